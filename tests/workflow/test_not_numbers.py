"""A training whose weights become NaN or infinite ends with one message, and no checkpoint of such weights is kept."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.recipe.stage_settings import Checkpointing  # noqa: E402
from tests.stages import Stages, logged  # noqa: E402

FAR, FARTHER = 1e30, 1e38
"""Rates of learning whose first update leaves weights that no sum can hold, and weights that are infinite."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return Stages(tmp_path_factory.mktemp("not_numbers"))


def diverging(stages, run, steps, lr):
    """A job that saves each step, with a rate of learning that no training survives."""
    job = stages.job("sft", run, steps, settings={"checkpointing": Checkpointing(save_period=1)})
    values = job.config.values()
    values["policy"]["optimizer"] |= {"lr": lr, "lr_warmup_iters": 0}
    return replace(job, config=training_config(values))


def test_it_ends_at_the_step_that_shows_it_and_not_at_the_planned_one(stages):
    job = diverging(stages, "far", 6, FAR)
    with pytest.raises(
        UserError, match=r"sft: diverged at step 2: weights are no numbers.*Its training diverged"
    ) as error:
        train(job)
    assert str(job.run / "metrics.jsonl") in str(error.value)
    assert [step["step"] for step in logged(job.run)] == [1, 2]
    assert [each.step for each in job.training.checkpoints] == [1], "weights that are numbers are kept"
    assert sorted(path.name for path in job.run.iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_weights_that_the_last_update_broke_are_not_sealed_though_no_loss_shows_it(stages):
    job = diverging(stages, "farther", 1, FARTHER)
    with pytest.raises(UserError, match=r"sft: diverged at step 1: weights are no numbers: .* has \d+ (NaN|infinite)"):
        train(job)
    (step,) = logged(job.run)
    assert math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])
    assert job.training.checkpoints == [] and sorted(path.name for path in job.run.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
    ]
