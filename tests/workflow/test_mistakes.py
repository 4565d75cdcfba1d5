"""Each mistake in docs/mistakes.md is made, and what is said of it is what that page says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from snakemake import cli

from scripts.commands.checks import check_version, findings
from scripts.commands.plan import dry_run_text, plan_text
from scripts.commands.project import Project
from scripts.controller.prepare import refuse_taken_folder
from scripts.errors import UserError
from scripts.files import write_json
from scripts.finding import Moment
from scripts.model.trainable import check_templates
from scripts.processes import process_start
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.recipe.model import PretrainedModel
from scripts.slurm.resources import check_executor
from scripts.stage.consistency import damage_of_stage
from scripts.stage.paths import StagePaths
from scripts.stage.publish import export_name
from tests.conftest import ROOT
from tests.pretrained import save_pretrained

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
        console = made._workflow.globals["CONSOLE"]
        for target in targets:
            error = __import__("snakemake").exceptions.MissingRuleException(target)
            said[target] = console.line(error)
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
RECIPES, CONFIGS, COMMANDS, LACKING, LIKELY = yaml.safe_load(MISTAKES.read_text()).values()
TARGETS = ["results/tiny/rlhf/ckpt", "results/rlhf/ckp", "rlhf", "results/rlvr9/ckpt"]
LATER, SWEPT = "results/sft/ckpt", "results/swept/ckpt"


@pytest.mark.parametrize("mistake", RECIPES)
def test_in_a_recipe(mistake, tmp_path):
    old, new = RECIPES[mistake]
    text = TINY.read_text()
    assert old in text
    (tmp_path / "tiny.yaml").write_text(text.replace(old, new, 1))
    holds(mistake, refusal(load_recipe, tmp_path / "tiny.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, rows and environments, whole and broken."""
    folder = tmp_path_factory.mktemp("own")
    save_pretrained("qwen3", folder / "model")
    (folder / "rows").mkdir()
    files = {
        "rows/empty.jsonl": "",
        "rows/rows.jsonl": "{}\n",
        "nothing.py": "import json\n\nrows = json.loads('[]')\n",
    }
    files |= {"short.py": "def verify(response):\n    return 1.0\n", "broken.py": "def verify(row, response)\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def planned(folder: Path, tmp_path: Path, old: str, new: str) -> Project:
    """The project of recipe tiny-pretrained on the folder's model, with a mistake."""
    text = (ROOT / "config/recipes/tiny-pretrained.yaml").read_text()
    assert old in text
    text = text.replace(old, new.replace("FOLDER", str(folder)), 1)
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("./results/sft/hf/model", str(folder / "model")))
    recipe = load_recipe(path)
    return Project(recipe, load_site(Path("config/sites/laptop.yaml"), recipe), tmp_path / "results")


@pytest.mark.parametrize("mistake", LACKING)
def test_what_is_not_there_or_not_whole_is_told_by_plan_and_refused_before_any_job(mistake, folder, tmp_path):
    try:
        project = planned(folder, tmp_path, *LACKING[mistake])
    except UserError as error:
        holds(mistake, f"{error}")
        return
    found = findings(project, Moment.READ, Moment.PLAN)
    (said,) = [finding.line for finding in found if finding.stops]
    holds(mistake, said)
    assert plan_text(project).endswith(f"\nSnakemake will refuse all of it: {said}")


@pytest.mark.parametrize("mistake", LIKELY)
def test_what_is_likely_a_mistake_is_told_by_plan_and_dry_run(mistake, folder, tmp_path):
    project = planned(folder, tmp_path, *LIKELY[mistake])
    for text in (plan_text(project), dry_run_text(project, {"sft", "rlvr"})):
        (said,) = [line for line in text.splitlines() if line.startswith("warning: ")]
        holds(mistake, said)


@pytest.mark.parametrize("mistake", CONFIGS)
def test_in_the_config(mistake):
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    holds(mistake, refusal(parse_config, config | CONFIGS[mistake]))


def test_of_recipes_models_and_sites(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    holds("`recipe=tiny`", refusal(load_recipe, Path("tiny")))
    holds("`model=` with a recipe that makes its own", refusal(load_recipe, TINY, None, "org/name"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    said = refusal(check_templates, PretrainedModel(name="org/name"), tmp_path)
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
    assert refusal(refuse_taken_folder, data).startswith("run=data: results/data has ")


@pytest.mark.parametrize("name", ["samples", "benchmarks"])
def test_a_run_or_a_stage_named_as_a_folder_that_runs_share(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    without_run, of_name = parse_config(config), parse_config(config | {"run": name})
    shared = f"results/{name} is a folder that all runs share; choose another name"
    assert refusal(refuse_taken_folder, of_name) == f"run={name}: {shared}"
    assert refusal(refuse_taken_folder, without_run, ["sft", name]) == f"stage {name}: {shared}"
    refuse_taken_folder(parse_config(config | {"run": "mine"}), ["sft", name])
    refuse_taken_folder(without_run, ["sft"])
    # Results of an earlier version, which refused nothing, stay usable.
    earlier = tmp_path / "results" / name
    (earlier / "sft").mkdir(parents=True)
    (earlier / "sft/config.yaml").touch()
    (earlier / "config.yaml").touch()
    refuse_taken_folder(without_run, ["sft", name])


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
    assert [line.split()[0] for line in plan.strip().splitlines()] == ["stage", "sft", "rlvr1", "in", "predicted,"]


def test_where_the_output_cannot_go_and_in_another_python(tree, monkeypatch):
    plan = [sys.executable, "-m", "scripts.commands", "plan"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(plan, cwd=tree.root, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    holds("output onto a full disk", done.stderr)
    done = tree.run(sys.executable, "-S", "-m", "scripts.train.run", "--help", check=False)
    holds("another Python: `python3 -m scripts.train.run`", done.stdout)
    monkeypatch.setitem(tree.environment, "PYTHONIOENCODING", "ascii")
    (tree.root / "config/sites/cluster.yaml").write_text("{name: c, threads: 2, slurm: {gpus_per_node: 8}}")
    assert re.search(r"in all .* <= \d", tree.run(*plan, "--site", "config/sites/cluster.yaml").stdout)
    monkeypatch.setitem(tree.environment, "PYTHONUNBUFFERED", "1")
    said = tree.run("bash", "-c", "snakemake --dry-run 2>err | head -1 && cat err").stdout
    assert "Building DAG" not in said.splitlines()[0] and "Error" not in said


def test_a_project_of_another_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [*check_version(None)] == []
    Path("Snakefile").write_text('module stagecoach_workflow:\n    snakefile:\n        stagecoach.snakefile("0.0.1")\n')
    (found,) = check_version(None)
    said = found.line
    holds("a project of another version than the installed", said)


def test_an_export_cut_short(tmp_path):
    paths, files = StagePaths(tmp_path / "sft"), {"model.safetensors": {"bytes": 7, "sha256": "a" * 64}}
    record = {"stage": "sft", "step": 1, "identity": "i", "files": files, "content": export_name(files)}
    write_json(paths.export_record, record)
    (paths.exported(record["content"])).mkdir(parents=True)
    (paths.exported(record["content"]) / "model.safetensors").write_bytes(b"weights")
    assert damage_of_stage(paths) == []
    (paths.exported(record["content"]) / "model.safetensors").write_bytes(b"wei")
    (said,) = damage_of_stage(paths)
    holds("an export cut short", said)


def test_every_row_of_the_page_is_held_here():
    text = Path(__file__).read_text() + MISTAKES.read_text()
    assert len(SAID) >= 30
    targets = [*TARGETS, LATER, SWEPT]
    for mistake in SAID:
        assert json.dumps(mistake) in text or mistake.split("`")[-2] in targets, mistake
