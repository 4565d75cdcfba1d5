"""What plan and status say of every state a stage can be in, from records alone."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from scripts.commands.plan import check_budget, plan_text
from scripts.commands.project import OPTIONS, Project, note_config, project_of
from scripts.commands.status import aligned, duration, status_text
from scripts.errors import UserError
from scripts.files import read_tail, sha256_text, write_json
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.resolve import sync_configs
from scripts.records import Reach
from scripts.slurm.executor import job_states
from scripts.slurm.jobs import FOLDER, JobRecord, latest_jobs, write_call
from scripts.stage.estimate import hours_text
from scripts.stage.owner import hold
from scripts.stage.progress import step_seconds
from scripts.stage.provenance import parent_of
from scripts.stage.publish import export_name
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, States
from scripts.stage.training_folder import TrainingFolder
from tests.cases import cases
from tests.conftest import ROOT
from tests.stages import checkpoint_record, note_made, open_folder

STAGES = ("sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf")


class Tree:
    """A results folder of the tiny recipe, in the working directory, whose records tell what a test wants."""

    def __init__(self, root: Path) -> None:
        self.site_values: dict = {"name": "cluster", "threads": 2, "slurm": {"gpus_per_node": 8, "max_runtime": 240}}
        self.recipe_path, self.site_path = root / "recipe.yaml", root / "site.yaml"
        self.recipe_path.write_text((ROOT / "config/recipes/tiny.yaml").read_text())
        self.site(stages={"rlvr1": {"nodes": 2, "runtime": 120, "step_seconds": 3600}})
        self.results = Path("results/tiny")
        for blend in self.recipe.blends:
            splits = {name: {"rows": 400, "sha256": f"{blend}-{name}"} for name in ("train", "validation")}
            write_json(self.results / "data" / blend / "manifest.json", splits)
            note_made(self.recipe, self.results, blend)
        self.sync()

    @property
    def recipe(self):
        return load_recipe(self.recipe_path)

    @property
    def project(self) -> Project:
        return Project(self.recipe, load_site(self.site_path, self.recipe), self.results, root=self.results.parent)

    def site(self, **values) -> None:
        self.site_values = {key: value for key, value in (self.site_values | values).items() if value is not None}
        self.site_path.write_text(yaml.safe_dump(self.site_values))

    def edit(self, old: str, new: str) -> None:
        text = self.recipe_path.read_text()
        assert old in text
        self.recipe_path.write_text(text.replace(old, new, 1))

    def sync(self) -> None:
        sync_configs(self.recipe, self.results)

    def stage(self, name: str) -> Stage:
        return Stage(self.recipe, self.results, name, root=self.results.parent)

    def state(self, stage: str) -> StageState:
        return States(self.recipe, self.results, self.results.parent).of(stage)

    def directory(self, stage: str) -> Path:
        return self.results / stage

    def run(self, stage: str, *steps: int) -> Path:
        """A run directory of what the stage is now, with sealed checkpoints and a log up to the last of these steps."""
        now = self.stage(stage)
        run = open_folder(now)
        for step in steps:
            saved = run / "saving" / f"checkpoint-{step}"
            saved.mkdir(parents=True)
            (saved / "model.safetensors").write_bytes(b"weights")
            TrainingFolder(run).seal(saved, step)
        self.log(stage, range(1, max(steps, default=0) + 1))
        return run

    def log(self, stage: str, steps, seconds: float = 2.0, times: int = 1, **more) -> None:
        names = more | {"reward_mean": 0.5, "kl": 0.0123} if stage != "sft" else {"loss": 1.25}
        lines = [json.dumps({"step": step, "seconds": seconds, **names}) for step in steps] * times
        with (self.directory(stage) / "run/metrics.jsonl").open("a") as file:
            file.write("".join(line + "\n" for line in lines))

    def publish(self, *stages: str) -> None:
        """Train, publish and export stages, as far as records tell."""
        for stage in stages:
            now = self.stage(stage)
            self.run(stage, now.planned)
            files = {"model.safetensors": {"bytes": 7, "sha256": sha256_text(now.identity)}}
            record = {"stage": stage, "step": now.planned, "identity": now.identity, "files": files}
            origins = {
                "facts": now.facts,
                "parents": [parent_of(now.parent.paths, now.start_record)] if now.parent else [],
            }
            write_json(now.paths.record, record | origins)
            write_json(now.paths.export_record, record | {"content": export_name(files)})

    def attempt(self, stage: str, step: int, outcome: str | None, call: int = 7, job: str | None = None) -> None:
        """An attempt that began at a step and ended there; no outcome: it was killed."""
        run = self.directory(stage) / "run"
        TrainingFolder(run).begin_attempt(step, call, nodes=2)
        if job:
            path = run / "attempts.jsonl"
            path.write_text(path.read_text().replace('"slurm_job": null', f'"slurm_job": "{job}"'))
        if outcome:
            TrainingFolder(run).end_attempt(step, outcome)

    def job(self, stage: str, state: str, ago: float = 0, job: str = "17", end: str = "N/A", reason="Priority") -> None:
        """What Slurm said of a stage's job, so many seconds ago."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - ago - 60))
        comment = f"rule_train_wildcards_{stage}"
        record = JobRecord(job, state, reason, 2, "node[1-2]", at, at, end, comment, str(self.results))
        write_call("call", {job: record})
        heard = time.time() - ago
        os.utime(FOLDER / "call.json", (heard, heard))

    def owner(self, stage: str, **changes) -> None:
        """A process on another host that holds a stage."""
        record = {"host": "node1", "pid": 5, "process_start": 1, "boot": "b", "pid_namespace": "n"}
        record |= {"slurm_job": "17", "since": time.time() - 60, "token": "t"} | changes
        write_json(self.directory(stage) / "run/owner.json", record)

    def write(self, path: str, text: str) -> None:
        (self.results / path).parent.mkdir(exist_ok=True)
        (self.results / path).write_text(text)

    def remove(self, path: str) -> None:
        (self.results / path).unlink()

    def age(self, path: str, seconds: float) -> None:
        """Let a file be so many seconds old."""
        at = time.time() - seconds
        os.utime(self.results / path, (at, at))

    def play(self, steps: list[dict]) -> None:
        """Do what methods of these names do; of `status` and `plan`, hold the lines of stages against patterns."""
        for step in steps:
            ((name, values),) = step.items()
            if name in ("status", "plan"):
                for stage, pattern in values.items():
                    line = getattr(self, name)(stage)
                    assert re.search(pattern, line), (step, line)
            elif isinstance(values, dict):
                getattr(self, name)(**values)
            else:
                getattr(self, name)(*values)

    def status(self, stage: str) -> str:
        return next(line for line in status_text(self.project).splitlines() if line.startswith(f"{stage} "))

    def plan(self, stage: str) -> str:
        return next(line for line in plan_text(self.project).splitlines() if line.startswith(f"{stage} "))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree in which nothing has trained; whoever asks Slurm fails."""
    monkeypatch.chdir(tmp_path)

    def down(*command):
        raise AssertionError(f"asked Slurm: {command}")

    monkeypatch.setattr("scripts.slurm.client.ask", down)
    return Tree(tmp_path)


# --- the states of status ---


@cases("plan_status.states", "steps")
def test_status_and_plan_tell_the_state_a_stage_is_in(tree, steps):
    tree.play(steps)


def test_a_stage_whose_data_ended_is_only_published_and_then_fresh_and_says_what_was_skipped(tree):
    tree.publish("sft")
    run = tree.run("rlvr1", 4, 9)
    assert tree.state("rlvr1").left == 3 and not tree.state("rlvr1").is_trained
    TrainingFolder(run).note_reach(9, Reach(11, is_end=True))
    assert tree.plan("rlvr1").split()[:7] == ["rlvr1", "resumes", "at", "step", "9", "2", "of"]
    assert tree.state("rlvr1").left == 2
    TrainingFolder(run).note_reach(9, Reach(9, is_end=True))
    assert tree.state("rlvr1").is_trained and tree.state("rlvr1").left == 0
    assert re.fullmatch(r"rlvr1 +trained +9/12 .* to be published, its data end at step 9 of 12", tree.status("rlvr1"))
    assert "published again" in tree.plan("rlvr1")
    stage = tree.stage("rlvr1")
    record = checkpoint_record("rlvr1", 9, identity=stage.identity, facts=stage.facts)
    record["parents"] = [parent_of(stage.parent.paths, stage.start_record)]
    write_json(tree.directory("rlvr1") / "ckpt/record.json", record)
    assert " trained " in tree.status("rlvr1"), "an earlier step is not the stage's last unless its record says so"
    ended = {"planned": 12, "rows_skipped": 48, "resumes": 2}
    write_json(tree.directory("rlvr1") / "ckpt/record.json", record | {"data_ended": ended})
    assert re.fullmatch(r"rlvr1 +fresh +9/12 .* 48 rows skipped at 2 resumes", tree.status("rlvr1"))


def test_training_of_an_sft_shows_its_loss(tree):
    tree.run("sft", 200)
    with hold(tree.directory("sft") / "run/owner.json"):
        tree.attempt("sft", 200, None)
        tree.log("sft", [201])
        assert re.search(r"sft +training +201/600 +- +- +13 min +2 +- .*, loss 1.250$", tree.status("sft"))


def test_what_no_run_links_to_is_found_again(tree):
    tree.publish("sft", "rlvr1")
    old = tree.stage("rlvr1").training.path
    tree.edit("rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, seed: 9,")
    tree.run("rlvr1", 4)
    tree.edit("seed: 9,", "seed: 1,")
    (tree.directory("rlvr1") / "ckpt/record.json").unlink()
    assert re.search(rf"rlvr1 +published again .* trained in {old}$", tree.plan("rlvr1"))


def test_status_fits_a_screen_and_its_columns_align(tree):
    tree.publish("sft", "rlvr1", "rlvr2", "rlvr3")
    tree.run("swe1", 4)
    tree.attempt("swe1", 4, "failed")
    tree.attempt("swe1", 4, "failed")
    tree.job("rlvr3", "PENDING", ago=90_000)
    lines = status_text(tree.project).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 120
    assert len({line.index("/") for line in lines[2:4]}) == 1


def test_without_slurm_neither_shows_what_makes_no_sense_there(tree):
    tree.site(slurm=None)
    tree.publish("sft")
    tree.run("rlvr1", 4)
    tree.job("rlvr1", "PENDING", ago=-5)
    assert status_text(tree.project).splitlines()[0].split() == ["stage", "state", "step", "reward", "KL", "left"]
    assert "unfinished" in tree.status("rlvr1")
    lines = plan_text(tree.project).splitlines()
    assert lines[0].split() == ["stage", "what", "steps", "time", "why"]
    assert re.fullmatch(r"sft +fresh +- +-", lines[1])
    assert re.fullmatch(r"rlvr1 +resumes at step 4 +8 of 12 +16 s", lines[2])
    assert re.fullmatch(r"rlvr2 +trains +12 of 12 +- +rlvr1 comes first", lines[3])
    assert re.fullmatch(r"in all +6 to train, 1 fresh +68 +≥ 16 s", lines[8])
    assert lines[9] == "reckoned from the steps that rlvr1 logged"
    assert "held-out scores to come of sft: never taken" in lines and len(lines) == 13
    assert any(line.startswith("rows to train on and held out: rlvr1 ") for line in lines[10:])
    assert lines[10] == "predicted, until what comes first is made: rlvr2, rlvr3, swe1 and 2 more"


def test_published_stages_whose_data_will_be_made_anew_wait_and_cost_all(tree):
    tree.site(slurm=tree.site_values["slurm"] | {"budget_gpu_hours": 0.01})
    tree.publish(*STAGES)
    check_budget(tree.project)
    tree.edit("rlvr2: {rows: 700,", "rlvr2: {rows: 700, holdout: 30,")
    words = "its data are made anew first"
    assert re.fullmatch(r"rlvr1 +fresh .*", tree.status("rlvr1"))
    assert re.fullmatch(rf"rlvr2 +waiting( +-)+ +{words}", tree.status("rlvr2"))
    assert re.search(rf"rlvr2 +trains +12 of 12 .* {words}$", tree.plan("rlvr2"))
    assert re.search(r"rlvr3 +waiting .* rlvr2 comes first$", tree.status("rlvr3"))
    assert not tree.state("rlvr2").is_trained
    with pytest.raises(UserError, match=r"\(rlvr2 .*, rlvr3 .*, swe1 .* and 2 more\)"):
        check_budget(tree.project)


# --- the plan's numbers ---


def test_the_plan_counts_steps_left_allocations_and_hours(tree):
    tree.publish("sft")
    assert re.fullmatch(r"sft +fresh +-( +-)+", tree.plan("sft"))
    # 12 steps of an hour; an allocation of two hours, less the margin, holds one of them
    line = r"rlvr1 +trains +12 of 12 +2 +16 +120 min +12 +24 +192 +never trained"
    assert re.fullmatch(line, tree.plan("rlvr1"))
    assert re.fullmatch(r"rlvr2 +trains +12 of 12 +1 +8 +60 min +1 +≤ 1 +≤ 8 +rlvr1 comes first", tree.plan("rlvr2"))
    lines = plan_text(tree.project).splitlines()
    assert re.fullmatch(r"in all +6 to train, 1 fresh +72 +- +- +- +17 +≤ 29 +≤ 232", lines[8])
    assert lines[9] == (
        "reckoned from the step_seconds of rlvr1; one whole allocation (≤) of rlvr2, rlvr3, swe1, swe2, rlhf, whose "
        "step_seconds are not set"
    )


def test_a_plan_of_nothing_is_all_zeros(tree):
    tree.publish(*STAGES)
    lines = plan_text(tree.project).splitlines()
    assert re.fullmatch(r"in all +7 fresh +0 +- +- +- +0 +0 +0", lines[8])
    assert lines[9:] == [f"held-out scores to come of {', '.join(STAGES)}: never taken"]


def test_the_files_rules_ask_count_the_steps_left_and_never_an_old_parents(tree):
    def left(stage):
        return tree.state(stage).left, tree.state(stage).is_trained

    assert left("sft") == (600, False) and left("rlvr1") == (12, False)
    tree.publish("sft")
    tree.run("rlvr1", 4)
    assert left("sft") == (0, True) and left("rlvr1") == (8, False)
    tree.publish("rlvr1", "rlvr2")
    assert left("rlvr2") == (0, True)
    tree.edit("sft: {algorithm: sft,", "sft: {algorithm: sft, seed: 5,")
    tree.sync()
    assert left("sft") == (600, False)
    assert left("rlvr1") == (12, False) and left("rlvr2") == (12, False)
    tree.edit("seed: 5,", "seed: 1,")
    tree.sync()
    assert left("rlvr2") == (0, True)


# --- the budget ---


def test_a_plan_beyond_the_budget_is_refused_with_its_largest_stages(tree):
    tree.publish("sft")
    tree.site(slurm=tree.site_values["slurm"] | {"budget_gpu_hours": 200})
    project = tree.project
    with pytest.raises(UserError) as error:
        check_budget(project)
    message = str(error.value)
    assert "need ≤ 232 GPU-hours (rlvr1 192, rlvr2 ≤ 8, rlvr3 ≤ 8 and 3 more)" in message
    assert "slurm.budget_gpu_hours of site cluster is 200" in message and "--config over_budget=true" in message
    assert f"Snakemake will refuse all of it: {message}" in plan_text(project)
    check_budget(replace(project, over_budget=True))
    check_budget(project, stages={"rlvr1"})
    assert "refuse" not in plan_text(Project(project.recipe, project.site, project.results, over_budget=True))


def test_what_is_trained_costs_nothing_and_what_follows_a_stale_stage_costs_all(tree):
    tree.site(slurm=tree.site_values["slurm"] | {"budget_gpu_hours": 1})
    tree.publish(*STAGES)

    check_budget(tree.project)
    tree.remove("rlvr1/ckpt/record.json")
    check_budget(tree.project)
    tree.log("rlhf", [12] * 50, seconds=3600)
    tree.edit("swe2: {algorithm: grpo,", "swe2: {algorithm: grpo, seed: 9,")
    tree.sync()
    with pytest.raises(UserError, match=r"need 96.1 GPU-hours \(rlhf 96, swe2 0.0533\)"):
        check_budget(tree.project)


def test_no_budget_and_no_slurm_refuse_nothing(tree):
    project = tree.project
    check_budget(project)
    tree.site(slurm=None)
    check_budget(replace(project, recipe=tree.recipe, site=tree.project.site))


# --- few bytes, and no Slurm ---


def read_bytes() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_long_logs_are_read_from_their_end(tree):
    tree.publish(*STAGES)
    entry = json.dumps({"step": 11, "seconds": 2.0, "reward_mean": 0.5, "environment_rewards": {"e" * 300: 0.5}}) + "\n"
    last = json.dumps({"step": 12, "seconds": 2.0, "reward_mean": 0.75}) + "\n"
    for stage in STAGES:
        (tree.directory(stage) / "run/metrics.jsonl").write_text(entry * 20_000 + last)
    before, start = read_bytes(), time.process_time()
    text = status_text(tree.project)
    assert text.count("0.750") == 6
    assert read_bytes() - before < 1_500_000, "7 logs of 8 MB each"
    assert time.process_time() - start < 2
    before = read_bytes()
    plan_text(tree.project)
    assert read_bytes() - before < 1_500_000


def test_the_end_of_a_file_is_whole_lines(tmp_path):
    path = tmp_path / "log"
    assert read_tail(path) == []
    path.write_text("one\ntwo\nthree\n")
    assert read_tail(path) == ["one", "two", "three"]
    assert read_tail(path, size=8) == ["three"]


def test_a_cut_line_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 2.0}\n{"step": 2}\n7\n{"step": 3, "sec')
    assert [entry["step"] for entry in TrainingFolder(tmp_path).recent_steps] == [1, 2]
    assert step_seconds(TrainingFolder(tmp_path).recent_steps) == 2.0 and step_seconds([]) is None


@pytest.mark.slow
def test_both_programs_work_where_there_is_no_slurm_command(tree, tmp_path):
    tree.publish("sft")
    tree.run("rlvr1", 4)
    tree.owner("rlvr1")
    config = tmp_path / "config.yaml"
    config.write_text(f"recipe: {tree.recipe_path}\nsite: nowhere.yaml\nrun: other\nseed: 8\n")
    (tmp_path / "empty").mkdir()
    environment = {"PATH": str(tmp_path / "empty"), "PYTHONPATH": str(ROOT)}
    chosen = ["--config", str(config), "--site", str(tree.site_path), "--run", "tiny", "--seed", "1"]
    outputs = []
    for program in ("plan", "status"):
        command = [sys.executable, "-m", "scripts.commands", program, *chosen]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert re.search(r"rlvr1 +training, from step 4 +8 of 12", outputs[0])
    assert re.search(r"rlvr1 +training +4/12", outputs[1])
    before = {path for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    status_text(tree.project)
    assert before == {path for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_a_mistake_in_the_config_names_its_line(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: a\nsite: b\nrum: c\n")
    with pytest.raises(UserError, match=r"config.yaml:3: rum"):
        load_config(tmp_path / "config.yaml", {})
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "other.yaml", {})
    (tmp_path / "config.yaml").write_text("recipe: a\nsite: b\nrun: c\n")
    config = load_config(tmp_path / "config.yaml", {"run": "d", "recipe": "e"})
    assert (config.run, config.recipe) == ("d", "e")


def test_a_query_that_changes_nothing_makes_the_known_state_new(tree, monkeypatch):
    tree.job("rlvr1", "PENDING", ago=4000)
    old = latest_jobs(tree.results)["rlvr1"]
    fields = [old.job.id, "PENDING", "Priority", "2", "node[1-2]", *[old.job.submitted] * 2, "N/A", old.job.comment]
    monkeypatch.setattr("scripts.slurm.executor.ask", lambda *command: "|".join(fields) + "\n")
    assert job_states("call", str(tree.results)) == {"17": "PENDING"}
    new = latest_jobs(tree.results)["rlvr1"]
    assert new.job == old.job and new.at > old.at + 3000


def test_lengths_of_time_and_hours_are_for_people():
    lengths = (9.4, 99, 600, 7260, 400_000)
    assert [duration(seconds) for seconds in lengths] == ["9 s", "99 s", "10 min", "2 h 1 min", "111 h"]
    hours = (0, 0.001, 0.5, 12.34, 99.6, 1234.5)
    assert [hours_text(each) for each in hours] == ["0", "<0.01", "0.5", "12.3", "99.6", "1,234"]
    assert hours_text(4, "≤") == "≤ 4"
    assert aligned([["a", "", "b"], ["cc", "10", ""]], left={0, 2}) == ["a    -  b", "cc  10"]


def test_another_run_is_judged_by_the_recipe_of_its_own_last_call_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny-pretrained"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / f"config/recipes/{name}.yaml").read_text())
    file, site = tmp_path / "config.yaml", str(ROOT / "config/sites/laptop.yaml")
    file.write_text(yaml.safe_dump({"recipe": "tiny.yaml", "site": site, "run": "mine"}))
    for run in ("mine", "other"):
        note_config(load_config(file, {"recipe": "tiny-pretrained.yaml", "run": run, "model": "/a/model"}))

    def judged(**said: str) -> tuple[str, str | None]:
        project = project_of(SimpleNamespace(**dict.fromkeys(OPTIONS) | {"config": file} | said))
        return project.recipe.name, getattr(project.recipe.model, "name", None)

    assert judged() == judged(run="mine") == judged(run="new") == ("tiny", None)
    assert judged(run="other") == ("tiny-pretrained", "/a/model")
    assert judged(run="other", model="/b") == ("tiny-pretrained", "/b")
    assert judged(run="other", recipe="tiny.yaml") == ("tiny", None)


def test_scores_on_test_rows_added_to_a_finished_run_are_to_come_and_train_nothing(tree):
    tree.publish(*STAGES)
    tree.edit("evaluation:\n", "evaluation:\n  test: true\n")
    tree.edit("  rlvr1:\n", "  rlvr1:\n    test: 5\n")
    assert re.match(r"rlvr1 +\S+ .*its data are made anew first", tree.plan("rlvr1")), "test rows were trained on"
    assert status_text(tree.project)
    splits = {name: {"rows": 400, "sha256": f"rlvr1-{name}"} for name in ("train", "validation", "test")}
    write_json(tree.results / "data/rlvr1/manifest.json", splits)
    note_made(tree.recipe, tree.results, "rlvr1")
    text = plan_text(tree.project)
    assert re.search(r"^in all +7 fresh +0 ", text, re.M)
    assert re.search(r"^held-out scores to come of .*rlhf: never taken$", text, re.M)


def test_a_waiting_stage_that_the_store_may_have_trained_may_train_and_is_counted(tree):
    tree.publish("sft", "rlvr1", "rlvr2")
    (tree.results / "rlvr1/hf/record.json").unlink()
    assert re.match(r"rlvr2 +may train +12 of 12 .*rlvr1 comes first", tree.plan("rlvr2"))
    assert "the store may have them trained: rlvr2" in plan_text(tree.project)
    assert re.match(r"rlvr3 +trains ", tree.plan("rlvr3"))


def test_the_status_tells_that_a_gate_stops(tree):
    tree.publish("sft")
    write_json(tree.directory("sft") / "gate.json", {"stage": "sft", "verdict": "stop"})
    assert "its gate says stop, so nothing starts from it" in tree.status("sft")
