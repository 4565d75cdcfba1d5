"""A project of one's own, apart from the clone: made by `stagecoach init`, with files of its own, pinned and moved."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from scripts.files import read_json
from tests.conftest import ROOT

VERSION = "3.1.4"
MADE = ("results/rl/gate.json", "results/data/others/check.json")
LETTERS = Path(__file__).with_name("letters")
ROW = '{"agent_ref": {"type": "responses_api_agents", "name": "letter"}, "responses_create_params": {"input": [{"role": "user", "content": "letter %d?"}]}}\n'


class Project:
    """A project, and a Python in which Stagecoach is installed in a version."""

    def __init__(self, root: Path) -> None:
        self.root, self.site = root, root.parent / "site-packages"
        self.install(VERSION)

    def install(self, version: str) -> None:
        """What pip leaves of an editable package: its metadata beside a path to it."""
        shutil.rmtree(self.site, ignore_errors=True)
        metadata = self.site / f"stagecoach_workflow-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stagecoach-workflow\nVersion: {version}\n")

    def run(self, *command: str | Path, folder: Path | None = None, fails: bool = False) -> str:
        """Run a command in the project, or in this folder; what it printed."""
        python = {
            "PYTHONPATH": f"{self.site}:{ROOT}/src",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder or self.root,
            env=os.environ | python,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert (done.returncode != 0) is fails, done.stdout
        return done.stdout

    def stagecoach(self, *arguments: str | Path, folder: Path | None = None, fails: bool = False) -> str:
        """The command as pip installs it."""
        return self.run(
            sys.executable, "-c", "import stagecoach; stagecoach.main()", *arguments, folder=folder, fails=fails
        )

    def planned(self, *arguments: str | Path, folder: Path | None = None) -> set[str]:
        """The jobs that Snakemake plans for the stage's gate and the data of another blend."""
        done = self.run("snakemake", *MADE, "--dry-run", *arguments, folder=folder)
        if "Nothing to be done" in done:
            return set()
        jobs = re.findall(r"^rule (\w+): (?:(?:stage|blend)=(\w+))?", done, re.MULTILINE)
        return {f"{rule} {name}".strip() for rule, name in jobs}

    def is_fresh(self, *arguments: str | Path, folder: Path | None = None) -> bool:
        """Whether Snakemake has nothing left to do for them."""
        return self.planned(*arguments, folder=folder) == set()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project made by init, with a recipe, an environment, a template and rows of its own, trained by its Snakefile."""
    folder = tmp_path_factory.mktemp("a person's")
    project = Project(folder / "my project")
    project.said = project.stagecoach("init", "my project", "--recipe", "tiny", folder=folder)
    shutil.copytree(LETTERS, project.root, dirs_exist_ok=True)
    (project.root / "rows").mkdir()
    (project.root / "rows/letters.jsonl").write_text("".join(ROW % number for number in range(24)))
    (project.root / "rows/others-1.jsonl").write_text("".join(ROW % number for number in range(30, 54)))
    config = project.root / "config/config.yaml"
    config.write_text(config.read_text().replace("tiny.yaml", "letters.yaml"))
    project.run("snakemake", *MADE)
    return project


def test_init_says_what_to_type_next_and_overwrites_nothing(trained):
    lines = trained.said.splitlines()
    assert lines[0].startswith("my project trains recipe tiny on site laptop")
    assert lines[1:] == ["  cd 'my project'", "  snakemake --dry-run", "  snakemake"]
    assert "is there already and not empty" in trained.stagecoach("init", ".", fails=True)


def test_its_files_are_found_by_paths_from_the_project_and_from_the_recipe(trained):
    record = read_json(trained.root / "results/rl/ckpt/record.json")
    assert record["step"] == 2
    config = yaml.safe_load((trained.root / "results/rl/config.yaml").read_text())
    verifier = (trained.root / "environments/letter.py").read_bytes()
    assert config["environments"] == {"letter": sha256(verifier).hexdigest()}
    assert config["policy"]["tokenizer"]["chat_template"] == (LETTERS / "config/recipes/plain.jinja").read_text()


def test_the_command_works_in_a_folder_of_the_project_and_by_directory(trained):
    plan = trained.stagecoach("plan")
    assert "in all  1 fresh" in plan
    assert trained.stagecoach("plan", folder=trained.root / "config/recipes") == plan
    assert trained.stagecoach("plan", "--directory", trained.root, folder=trained.root.parent) == plan
    lineage = trained.stagecoach("lineage", "ckpt", folder=trained.root / "results/rl")
    assert "stagecoach-workflow" not in lineage and "rl" in lineage  # trained by a checkout's code


def test_another_version_than_the_pinned_one_is_refused_in_one_line(trained):
    trained.install("3.2.0")
    said = trained.run("snakemake", "--dry-run", fails=True).splitlines()[-1]
    trained.install(VERSION)
    assert said.startswith("error: this project is pinned to stagecoach-workflow 3.1.4, and 3.2.0 is installed: ")


def test_moved_with_snakemakes_memory_linked_or_on_another_disk_it_stays_fresh(trained, tmp_path):
    assert trained.is_fresh()
    moved = copy(trained)
    moved.root = shutil.copytree(trained.root, tmp_path / "moved", symlinks=True)
    (moved.root / "results").rename(tmp_path / "disk")
    (moved.root / "results").symlink_to(tmp_path / "disk")
    assert moved.is_fresh()
    assert moved.is_fresh("--snakefile", ROOT / "Snakefile", "--directory", moved.root, folder=tmp_path)
    config = moved.root / "config/config.yaml"
    config.write_text(config.read_text() + f"\nresults: {tmp_path / 'disk'}\n")
    done = moved.run("snakemake", f"{tmp_path / 'disk'}/rl/ckpt", "--dry-run")
    assert "rule train" not in done or "already trained" in done


def test_an_edited_row_trains_its_stage_and_an_edited_environment_scores_again_too(trained, tmp_path):
    edited = copy(trained)
    edited.root = shutil.copytree(trained.root, tmp_path / "edited", symlinks=True)
    for path in [*edited.root.glob("rows/*"), *edited.root.glob("environments/*.py")]:
        path.touch()
    others = edited.root / "rows/others-2.jsonl"
    others.write_text(ROW % 60)
    assert edited.planned() == {"source", "fill others", "check others"}
    others.unlink()
    rows = edited.root / "rows/letters.jsonl"
    times, text = rows.stat(), rows.read_text()
    rows.write_text(text.replace("letter 3?", "letter 4?"))
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = {f"{rule} rl" for rule in ("preflight", "train", "export", "metrics", "evaluate", "gate")}
    assert edited.planned() == {"source", "fill letters", "check letters"} | after
    assert "its data are made anew first" in edited.stagecoach("plan")
    rows.write_text(text)
    environment = edited.root / "environments/letter.py"
    environment.write_text(environment.read_text().replace("def verify", "MORE = 1\n\n\ndef verify"))
    assert edited.planned() == after


def test_two_projects_work_at_the_same_time(trained, tmp_path):
    other, ignored = copy(trained), shutil.ignore_patterns("results", ".snakemake")
    other.root = shutil.copytree(trained.root, tmp_path / "other", symlinks=True, ignore=ignored)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(trained.run, "snakemake", "results/data/letters/check.json", "--force")
        second = pool.submit(other.run, "snakemake", "results/data/letters/check.json")
        assert all("100%" in each.result() for each in (first, second))
    assert trained.is_fresh()
