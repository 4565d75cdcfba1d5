"""A colleague goes on with what another user began in a shared tree; no credential of a recipe or the shell is shown."""

import json
import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import Workflow
from tests.programs import until
from tests.users import ANN, BOB, EVE, SHARED_GROUP, as_user, can_be_others, share, shared_folder

CANARY = "CanaryOf5tagecoach42"


@pytest.fixture
def tree(finished):
    """The finished tree in a folder that Ann shares, with rlvr1 asked for more steps."""
    with shared_folder() as folder:
        workflow = finished.copied_to(folder / "tree")
        workflow.environment = finished.environment | {"LOGNAME": "colleague"}
        workflow.edit("rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, grpo: {max_num_steps: 6},")
        site = workflow.root / "config/sites/laptop.yaml"
        site.write_text(f"{site.read_text()}group: '{SHARED_GROUP}'\n")
        share(folder)
        for user in (ANN, BOB, EVE):
            (folder / str(user)).mkdir()
            os.chown(folder / str(user), user, user)
        yield workflow


def at_home(tree: Workflow, user: int, *command: str) -> list[str]:
    """A command line that runs a command as one of them, with a home of their own."""
    return as_user(user, "env", f"HOME={tree.root.parent / str(user)}", *command)


def steps_in(metrics: Path) -> list[int]:
    """The steps that a run has logged."""
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


@pytest.mark.skipif(not can_be_others(), reason="only root can be another user")
def test_a_colleague_goes_on_with_a_killed_run_and_who_may_not_write_is_told_whose_it_is(tree):
    ckpt = "results/short/rlvr1/ckpt"
    log, metrics = (tree.root.parent / "snakemake.log").open("w"), tree.results / "rlvr1/run/metrics.jsonl"
    before = steps_in(metrics)
    ann = subprocess.Popen(
        at_home(tree, ANN, "snakemake", ckpt), cwd=tree.root, env=tree.environment, stdout=log, stderr=log
    )
    until(lambda: len(steps_in(metrics)) >= len(before) + 2, 300, (tree.root.parent / "snakemake.log").read_text)
    for process in [psutil.Process(ann.pid), *psutil.Process(ann.pid).children(recursive=True)]:
        process.kill()
    ann.wait()
    for user, command in ((BOB, "plan"), (EVE, "status")):
        said = tree.run(*at_home(tree, user, "python", "-m", "scripts.commands", command)).stdout
        assert re.search(r"rlvr1 +(resumes at step|unfinished)", said)
    refused = tree.run(*at_home(tree, EVE, "snakemake", "--dry-run", ckpt), check=False)
    assert refused.returncode == 1 and "Traceback" not in refused.stdout
    assert re.search(
        rf"/\.snakemake/\S+: user {EVE} may not \w+( to)? it: it is user {ANN}'s.*mode 06[46][04]", refused.stdout
    )
    tree.run(*at_home(tree, BOB, "snakemake", ckpt))
    assert json.loads((tree.results / "rlvr1/ckpt/record.json").read_text())["step"] == 6
    assert steps_in(metrics)[: len(before) + 2] == [*range(1, len(before) + 3)] and steps_in(metrics)[-1] == 6
    assert steps_in(metrics).count(1) == 1, "Bob went on from Ann's checkpoint"
    for path in tree.root.rglob("*"):
        if not path.is_symlink() and path.stat().st_uid in (ANN, BOB):
            assert path.stat().st_gid == SHARED_GROUP and path.stat().st_mode & 0o060 == 0o060, path


def found_in(folder, *canaries: str) -> list[str]:
    """The files that hold one of them."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if any(canary.encode() in path.read_bytes() for canary in canaries)]


def test_a_credential_in_a_recipe_or_site_stops_everything_and_is_neither_shown_nor_written(fresh):
    recipe, site = fresh.root / "config/recipes/short.yaml", fresh.root / "config/sites/laptop.yaml"
    right = {path: path.read_text() for path in (recipe, site)}
    places = (
        (recipe, {"source": {"kind": "hub", "repository": f"https://user:{CANARY}@hub.example.org/org/data"}}),
        (recipe, {"source": {"kind": "hub", "repository": "org/data", "revision": f"hf_{CANARY}"}}),
        (site, {"environment": {"HF_TOKEN": CANARY}}),
    )
    commands = (
        ("snakemake", "--dry-run"),
        *(("python", "-m", "scripts.commands", name) for name in ("plan", "doctor")),
    )
    for (path, wrong), command in zip(places, commands, strict=True):
        path.write_text(yaml.safe_dump(yaml.safe_load(right[path]) | wrong))
        done = fresh.run(*command, check=False)
        assert done.returncode == 1 and CANARY not in done.stdout
        assert re.search(rf"{path.name}:\d+: \S+: holds .*, not shown here", done.stdout)
        assert found_in(fresh.root, CANARY) == [str(path)]
        path.write_text(right[path])
    done = fresh.run("snakemake", "--dry-run", "--config", f"model=https://{CANARY}@hub.example.org/m", check=False)
    assert done.returncode == 1 and CANARY not in done.stdout and found_in(fresh.root, CANARY) == []


def test_credentials_of_the_shell_reach_no_output_and_no_file(fresh):
    canaries = {name: f"{CANARY}{place}" for place, name in enumerate(("HF_TOKEN", "WANDB_API_KEY", "GENRM_TOKEN"))}
    canaries |= {"HTTPS_PROXY": f"http://user:{CANARY}@127.0.0.1:9", "HF_ENDPOINT": f"http://user:{CANARY}@127.0.0.1:9"}
    fresh.environment = fresh.environment | canaries
    fresh.edit("source: {kind: synthetic}", "source: {kind: hub, repository: org/data}")
    for rows in (400, 80, 60):  # how many to write
        fresh.edit(f"    rows: {rows}\n", "")
    for command in (("--dry-run",), ("results/short/data/source/record.json",)):
        done = fresh.run("snakemake", *command, check=False)
        assert CANARY not in done.stdout
    assert "no connection" in (fresh.results / "logs/source.log").read_text()
    for name in ("plan", "status", "doctor"):
        assert CANARY not in fresh.run("python", "-m", "scripts.commands", name, check=False).stdout
    assert found_in(fresh.root, CANARY) == []
