"""A student learns from two teachers in turns, each on its environment, by the loss of TRL's trainer."""

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from trl import DistillationTrainer  # noqa: E402

from scripts.backends.protocol import write_job  # noqa: E402
from scripts.backends.trl import distillation_trainer, setup  # noqa: E402
from scripts.backends.trl.algorithm import Dtensor  # noqa: E402
from scripts.backends.trl.distillation_trainer import make_trainer  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.model.loading import fill_model, load_model  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.rewards import registry  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.ranks import StopAt  # noqa: E402
from tests.stages import Stages, checkpoint, logged, weights_hash  # noqa: E402
from tests.trials import break_weight  # noqa: E402
from tests.workflow.test_multinode import free_port  # noqa: E402

STEPS, STOP, TAUGHT, LEARNT = 6, 3, 20, 16
MATH, MCQA = "math_with_judge_simple_agent", "mcqa_simple_agent"


WHERE_ASKED = pytest.mark.skipif("STAGECOACH_ALL_RANKS" not in os.environ, reason="STAGECOACH_ALL_RANKS is not set")


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The student's start, and a teacher of each environment."""
    made = Stages(tmp_path_factory.mktemp("distillation"), ROOT / "tests/distillation.yaml")
    train(made.job("start", "start", TAUGHT))
    made.parent = {"parent_model": checkpoint(made.directory / "start", TAUGHT)}
    for teacher in ("math", "mcqa"):
        train(made.job(teacher, teacher, TAUGHT, **made.parent))
    made.teachers = {
        "teachers.reasoning": checkpoint(made.directory / "math", TAUGHT),
        "teachers.choice": checkpoint(made.directory / "mcqa", TAUGHT),
    }
    return made


def job_of(stages, run, steps=STEPS, roles=None, planned=STEPS, **changes):
    """The student's job; `changes` are of its resolved config."""
    roles = stages.teachers if roles is None else roles
    job = stages.job("student", run, steps, planned=planned, roles=roles, **stages.parent)
    values = job.config.values()
    return replace(job, config=training_config(values | changes))


@pytest.fixture(scope="module")
def straight(stages):
    """The run directory of an undisturbed training."""
    job = job_of(stages, "straight")
    train(job)
    return job.run


def test_the_student_approaches_both_teachers(stages):
    job = job_of(stages, "learnt", LEARNT, planned=LEARNT)
    train(job)
    for role in ("reasoning", "choice"):
        distances = [step["divergences"][role] for step in logged(job.run)]
        first, last = (statistics.fmean(few) for few in (distances[:3], distances[-3:]))
        assert 0 < last < 0.75 * first, role


def test_its_log_tells_how_far_it_is_from_each_teacher(straight):
    for step in logged(straight):
        assert {*step["divergences"]} == {"reasoning", "choice"}
        nearest, farthest = min(step["divergences"].values()), max(step["divergences"].values())
        assert 0.8 * nearest <= step["loss"] <= 1.2 * farthest, "a teacher's is the mean of its micro-batches' means"
        assert step["tokens"] > 0 and step["entropy"] > 0 and 0 < step["response_length_mean"] <= 16
        assert sum(step["timing"].values()) == pytest.approx(step["seconds"])


def test_an_interrupted_training_ends_with_the_same_bits(stages, straight):
    job = job_of(stages, "parts")
    train(replace(job, stop=StopAt(0, STOP)))
    assert [step["step"] for step in logged(job.run)] == [1, 2, STOP]
    train(replace(job, resume_from=checkpoint(job.run, STOP)))
    assert weights_hash(job.run, STEPS) == weights_hash(straight, STEPS)
    assert [step["loss"] for step in logged(job.run)] == [step["loss"] for step in logged(straight)]


def batch_of(trainer):
    """A step's rows with their responses, in one batch."""
    trainer.model.train()
    rows = [trainer.train_dataset[place] for place in range(16)]
    (batch,) = trainer.micro_batches(trainer._generate_and_score_completions(rows), 1)
    return batch


@pytest.mark.parametrize(("kl_type", "beta"), [("forward", None), ("reverse", None), ("jsd", 0.3)])
def test_the_loss_is_trls_with_each_rows_teacher(stages, kl_type, beta):
    trainer = make_trainer(job_of(stages, "loss", loss_fn={"kl_type": kl_type, "beta": beta}))
    batch = batch_of(trainer)
    assert {*batch["teacher"].tolist()} == {0, 1}
    plain = 0.0
    for place, folder in enumerate(trainer.folders):
        rows = batch["teacher"] == place
        part = {name: value[rows] if value.ndim else value for name, value in batch.items()}
        trainer.teacher_model, trainer._turn = load_model(folder), None
        loss, _, tokens = DistillationTrainer._compute_loss(trainer, trainer.model, part, batch["num_items_in_batch"])
        assert loss > 0 and tokens == part["completion_mask"].sum()
        plain += loss
    plain.backward()
    expected = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    loss, entropy, tokens = trainer._compute_loss(trainer.model, batch, batch["num_items_in_batch"])
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert tokens == batch["num_items_in_batch"] and entropy > 0
    for name, weight in trainer.model.named_parameters():
        assert torch.allclose(weight.grad, expected[name], rtol=1e-3, atol=1e-6), name
    assert trainer.beta == {"forward": 0, "reverse": 1, "jsd": 0.3}[kl_type]


def test_teachers_come_in_turns_and_the_same_export_in_two_roles_comes_once(stages, monkeypatch):
    loaded, alive, filled = [], [], []

    def counted(folder, precision):
        gc.collect()
        assert not any(model() is not None for model in alive), "a second teacher beside the first"
        model = load_model(folder, precision)
        loaded.append(folder.parents[1].name)
        alive.append(weakref.ref(model))
        return model

    def refilled(model, like, folder):
        filled.append(folder.parents[1].name)
        return fits and fill_model(model, like, folder)

    monkeypatch.setattr(distillation_trainer, "load_model", counted)
    monkeypatch.setattr(distillation_trainer, "fill_model", refilled)
    fits = False
    train(job_of(stages, "turns"))
    assert loaded == ["math", *["mcqa", "math"] * 3], "each is loaded once a step, and the last is kept for the next"
    filled.clear()
    loaded.clear()
    fits = True
    train(job_of(stages, "filled"))
    assert loaded == ["math"] and filled == ["mcqa", "math"] * 3, "the one that is there takes over their weights"
    assert weights_hash(stages.directory / "filled", STEPS) == weights_hash(stages.directory / "turns", STEPS)
    loaded.clear()
    train(job_of(stages, "alike", roles=dict.fromkeys(stages.teachers, stages.teachers["teachers.choice"])))
    assert loaded == ["mcqa"]
    assert {*logged(stages.directory / "alike")[0]["divergences"]} == {"reasoning+choice"}


def test_a_policy_in_bfloat16_has_teachers_in_bfloat16(stages, straight, monkeypatch):
    asked = []
    monkeypatch.setattr(setup, "computes_bfloat16", lambda device: True)
    monkeypatch.setattr(
        distillation_trainer, "load_model", lambda folder, dtype: asked.append(dtype) or load_model(folder, dtype)
    )
    job = job_of(stages, "rounded", 1)
    train(replace(job, config=training_config(job.config.values() | {"policy": rounded(job)})))
    assert asked and {*asked} == {torch.bfloat16}
    assert logged(job.run)[0]["loss"] == pytest.approx(logged(straight)[0]["loss"], rel=0.2)


def rounded(job):
    """The policy's values, computing in bfloat16."""
    return job.config.values()["policy"] | {"precision": "bfloat16"}


def test_a_sole_teacher_teaches_every_environment(stages, straight):
    job = job_of(stages, "sole", 1, {"teachers.one": stages.teachers["teachers.reasoning"]})
    values = job.config.values()
    del values["distillation"]["of"]
    train(replace(job, config=training_config(values)))
    assert {*logged(job.run)[0]["divergences"]} == {"one"}


def test_a_teacher_whose_weights_are_no_numbers_is_named(stages, tmp_path):
    broken = shutil.copytree(stages.teachers["teachers.choice"], tmp_path / "broken")
    break_weight(broken / "model.safetensors", "model.norm.weight")
    job = job_of(stages, "broken", roles=stages.teachers | {"teachers.choice": broken})
    with pytest.raises(UserError, match=rf"teachers.choice: its divergence .* is no number .* the teacher {broken} is"):
        train(job)


def test_an_environment_with_tools_of_its_own_is_refused(stages, monkeypatch):
    monkeypatch.setattr(registry, "SPECS", registry.SPECS.copy())
    job = job_of(stages, "tools", environments={"calculator": "0"})
    registry.register({"calculator": ROOT / "config/environments/calculator.py"}, {})
    with pytest.raises(UserError, match="plays no turns with an environment's tools; leave calculator out of the bl"):
        make_trainer(job)


@pytest.fixture(scope="module")
def ranks(stages):
    """Two ranks with copies and with shares of the weights, straight and in parts."""
    where, plan = stages.directory, []

    def add(job, stop=None):
        file = where / f"{len(plan)}.json"
        write_job(file, job)
        plan.append([str(file), stop])

    for name, enabled in (("copies", False), ("shares", True)):
        for run in (name, f"{name}.parts"):
            job = replace(job_of(stages, run), nodes=2)
            policy = job.settings.policy.model_copy(update={"dtensor_cfg": Dtensor(enabled=enabled)})
            job = replace(job, settings=job.settings.model_copy(update={"policy": policy}))
            if run == name:
                add(job)
            else:
                add(replace(job, max_num_steps=STOP))
                add(replace(job, resume_from=checkpoint(job.run, STOP)))
    (where / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "tests.ranks", where / "plan.json"]
    port = str(free_port())
    both = [subprocess.Popen([*command, str(rank), port], cwd=ROOT) for rank in (0, 1)]
    assert [rank.wait(300) for rank in both] == [0, 0]
    return where


@WHERE_ASKED
@pytest.mark.parametrize("name", ["copies", "shares"])
def test_two_ranks_resume_to_the_same_bits(ranks, name):
    assert weights_hash(ranks / f"{name}.parts", STEPS) == weights_hash(ranks / name, STEPS)


@WHERE_ASKED
def test_shares_learn_what_copies_learn(ranks):
    first, second = (logged(ranks / name)[0] for name in ("copies", "shares"))
    for key in ("grad_norm", "entropy", "loss"):
        assert second[key] == pytest.approx(first[key], rel=1e-3), key
