"""Each mistake in docs/mistakes.md is made, and what is said of it is what that page says."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from snakemake import cli

from scripts.commands.prepare import refuse_taken_folder
from scripts.errors import UserError
from scripts.model.pretrained import _check_one_template
from scripts.processes import process_start
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.slurm.site_check import check_executor
from tests.conftest import ROOT

TINY = ROOT / "config/recipes/tiny.yaml"
ROW = re.compile(r"^\| (.+?) \| `(.+?)` \| .*\|$", re.M)
SAID = dict(ROW.findall((ROOT / "docs/mistakes.md").read_text()))
# Reads the workflow once for all targets; of a recipe with a swept stage, and one that starts later, it is read again.
ASK = """
import json, sys
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings
said = {}
for config, targets in json.loads(sys.argv[1]):
    with SnakemakeApi(OutputSettings()) as api:
        made = api.workflow(
            resource_settings=ResourceSettings(cores=1), config_settings=ConfigSettings(config=config),
            snakefile=Path("Snakefile"),
        )
        messages = made._workflow.globals["CONSOLE"].messages
        for target in targets:
            error = __import__("snakemake").exceptions.MissingRuleException(target)
            said[target] = messages.line(error)
print(json.dumps(said))
"""


def holds(mistake: str, said: str) -> None:
    """That the page says this of the mistake; its dots stand for anything."""
    pattern = ".*".join(map(re.escape, SAID[mistake].split("…")))
    assert re.fullmatch(pattern, said.strip(), re.S), said


def refusal(call: Callable, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


MISTAKES = Path(__file__).with_name("mistakes.yaml")
RECIPES, CONFIGS, COMMANDS = yaml.safe_load(MISTAKES.read_text()).values()
TARGETS = ["results/tiny/rlhf/ckpt", "results/rlhf/ckp", "rlhf", "results/rlvr9/ckpt"]
LATER, SWEPT = "results/sft/ckpt", "results/swept/ckpt"


@pytest.mark.parametrize("mistake", RECIPES)
def test_in_a_recipe(mistake, tmp_path):
    old, new = RECIPES[mistake]
    text = TINY.read_text()
    assert old in text
    (tmp_path / "tiny.yaml").write_text(text.replace(old, new, 1))
    holds(mistake, refusal(load_recipe, tmp_path / "tiny.yaml"))


@pytest.mark.parametrize("mistake", CONFIGS)
def test_in_the_config(mistake):
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    holds(mistake, refusal(parse_config, config | CONFIGS[mistake]))


def test_of_recipes_models_and_sites(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    holds("`recipe=tiny`", refusal(load_recipe, Path("tiny")))
    holds("`model=` with a recipe that makes its own", refusal(load_recipe, TINY, None, "org/name"))
    tokenizer = type("Tokenizer", (), {"chat_template": None})
    said = refusal(_check_one_template, "org/name", tokenizer, tmp_path)
    holds("a model whose tokenizer has no chat template", said)
    site = load_site(Path("config/sites/cluster.yaml"), load_recipe(TINY))
    said = refusal(check_executor, "config/sites/cluster.yaml", site, "local")
    holds("a site with a slurm section, without `--profile slurm`", said)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = refusal(check_executor, "config/sites/cluster.yaml", site, "slurm")
    holds("`--profile slurm` where Slurm is not installed", said)


def test_a_run_named_as_a_stage_that_is_there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    rlhf, data = (parse_config(config | {"run": name}) for name in ("rlhf", "data"))
    for place in ("sft", "rlhf", "data/source"):
        (tmp_path / "results/data" / place).mkdir(parents=True)
    (tmp_path / "results/data/sft/config.yaml").touch()
    for run in (rlhf, data):
        refuse_taken_folder(run)  # nothing is there of the first; the second has results of its own
    (tmp_path / "results/data/sft/config.yaml").unlink()
    (tmp_path / "results/rlhf").mkdir()
    (tmp_path / "results/rlhf/config.yaml").touch()
    holds("`run=rlhf` beside results without a run", refusal(refuse_taken_folder, rlhf))
    assert refusal(refuse_taken_folder, data).startswith("run=data: results/data holds ")


@pytest.mark.parametrize("mistake", COMMANDS)
def test_on_the_command_line(mistake, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        cli.parse_args(COMMANDS[mistake])
    holds(mistake, capsys.readouterr().err.splitlines()[-1])


def test_a_target_that_config_swallows():
    with pytest.raises(ValueError, match="Config entries") as caught:
        cli.parse_config(["seed=7", "results/rlhf/ckpt"])
    holds("a target behind `--config`", str(caught.value))


@pytest.fixture
def tree(fresh):
    """A tree with the config that a clone has."""
    (fresh.root / "config/config.yaml").write_text((ROOT / "config/config.yaml").read_text())
    (fresh.root / "slurm").symlink_to("profiles/slurm")
    return fresh


def error_of(output: str) -> str:
    """The one line of an error, which ends what Snakemake prints, without a frame of Python."""
    *_, before, last = output.splitlines()
    assert last.startswith("error: ") and not re.search(r'File "|Error in file', output), output
    assert not before.startswith(" ")
    return last.removeprefix("error: ")


def test_targets_that_no_rule_makes(tree):
    text = TINY.read_text().replace("parent: sft, blend: rlvr1}", "parent: sft, blend: rlvr1}\n  SWEPT", 1)
    swept = "swept: {algorithm: grpo, parent: sft, blend: rlvr1, sweep: {policy.optimizer.lr: [1.0e-6, 3.0e-6]}}"
    (tree.root / "config/recipes/swept.yaml").write_text(text.replace("SWEPT", swept))
    calls = [({}, TARGETS), ({"recipe": "config/recipes/swept.yaml"}, [SWEPT]), ({"start": "rlvr1"}, [LATER])]
    said = json.loads(tree.run(sys.executable, "-c", ASK, json.dumps(calls)).stdout.splitlines()[-1])
    for mistake in SAID:
        if (target := mistake.split("`")[-2] if "`" in mistake else "") in said:
            holds(mistake, f"{said[target]}")


def test_what_snakemake_says_itself(tree):
    output = tree.snakemake("results/tiny/rlhf/ckpt", check=False)
    holds("a target of another run: `results/tiny/rlhf/ckpt`", error_of(output))
    holds("a rule instead of a file: `train`", error_of(tree.snakemake("train", check=False)))
    config = tree.root / "config/config.yaml"
    config.write_text("recipe: a: b\n")
    holds("no YAML", error_of(tree.snakemake(check=False)))
    config.write_text("")
    holds("an empty file", error_of(tree.snakemake(check=False)))
    done = tree.run("snakemake", "--directory", "docs", check=False)
    holds("called in a folder without config/config.yaml", error_of(done.stdout))


def test_without_slurm_and_where_another_call_runs(tree, monkeypatch):
    (tree.root / "slurm.conf").touch()
    monkeypatch.setitem(tree.environment, "SLURM_CONF", str(tree.root / "slurm.conf"))
    output = tree.snakemake("--profile", "slurm", "results/data/source/record.json", check=False)
    holds("`--profile slurm` on a machine without Slurm", error_of(output))
    notes = tree.root / ".snakemake/stagecoach"
    (notes / "other.json").write_text(json.dumps([os.uname().nodename, os.getpid(), process_start(os.getpid())]))
    (tree.root / ".snakemake/locks").mkdir(exist_ok=True)
    for kind in ("input", "output"):
        (tree.root / f".snakemake/locks/0.{kind}.lock").write_text("results/data/source/record.json\n")
    holds("two calls in one folder", error_of(tree.snakemake("results/data/source/record.json", check=False)))


def test_a_dry_run_is_a_line_a_job_and_ends_with_the_plan(tree):
    output = tree.snakemake("--dry-run", "results/rlvr1/ckpt")
    assert "rule train: stage=rlvr1; not there yet\n    resources: nodes=1, runtime=60, mem_mb=4000" in output
    assert "publishes_only" not in output and "Missing output" not in output
    plan, end = output.rstrip().split("\n\n")[-2:]
    assert end.startswith("This was a dry-run")
    assert [line.split()[0] for line in plan.strip().splitlines()] == ["stage", "sft", "rlvr1", "in"]


def test_every_row_of_the_page_is_held_here():
    text = Path(__file__).read_text() + MISTAKES.read_text()
    assert len(SAID) >= 30
    targets = [*TARGETS, LATER, SWEPT]
    for mistake in SAID:
        assert json.dumps(mistake) in text or mistake.split("`")[-2] in targets, mistake
