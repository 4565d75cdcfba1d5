"""NeMo-RL's TensorBoard events become a line of metrics a step, once it is over."""

import json

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from scripts.backends.nemo_rl.metrics import StepLog
from scripts.errors import UserError
from scripts.evaluate.gate import refuse_divergence
from scripts.recipe.load import load_recipe
from scripts.stage.progress import read_log
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT

ROLLOUTS = {"train/reward": 0.5, "train/total_reward/stddev": 0.25}
STEP = ROLLOUTS | {"train/kl_penalty": 0.0, "train/lr": 1e-6, "train/loss": 0.125}
OVER = {"timing/train/total_step_time": 8.0}


class Driver:
    """What a driver's start writes of its steps."""

    def __init__(self, logs, number: int) -> None:
        self.writer = EventFileWriter(str(logs / f"exp_{number:03d}/tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self.write(step, summary)

    def write(self, step: int, summary: Summary) -> None:
        self.writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
        self.writer.flush()


class Place:
    """A run's logs, and what is written of them."""

    def __init__(self, folder) -> None:
        self.logs, self.output = folder / "logs", folder / "metrics.jsonl"

    def driver(self, number: int = 1) -> Driver:
        return Driver(self.logs, number)

    def log(self, measures_kl: bool = False, **options) -> StepLog:
        return StepLog(self.logs, self.output, measures_kl=measures_kl, **options)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_text().splitlines()] if self.output.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines()]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_step_is_logged_when_it_is_over_and_not_before(place):
    log, driver = place.log(), place.driver()
    assert log.follow() == 0
    driver.log(1, STEP)
    assert (log.follow(), place.lines()) == (0, [])
    driver.log(1, OVER)
    assert (log.follow(), log.last_step, log.last_seconds) == (1, 1, 8.0)
    (line,) = place.lines()
    expected = {"reward_mean": 0.5, "reward_std": 0.25, "lr": pytest.approx(1e-6), "loss": 0.125, "seconds": 8.0}
    assert line == {"step": 1} | expected
    assert log.follow() == 0


def test_the_phases_of_a_step_are_told_and_late_ones_open_no_step_again(place):
    log, driver = place.log(), place.driver()
    driver.log(1, STEP | {"timing/train/policy_training": 3.0} | OVER)
    assert (log.follow(), place.lines()[0]["timing"]) == (1, {"policy_training": 3.0})
    driver.log(1, {"timing/train/weight_sync": 1.0})
    assert (log.follow(is_over=True), len(place.lines())) == (0, 1)


def test_a_step_without_its_time_is_over_when_the_next_begins_or_training_ends(place):
    log, driver = place.log(), place.driver()
    driver.log(1, STEP)
    driver.log(2, STEP)
    assert (log.follow(), place.steps()) == (1, [1])
    assert (log.follow(is_over=True), place.steps()) == (1, [1, 2])


def test_a_step_that_crashed_after_its_rollouts_was_not_trained_and_is_not_logged(place):
    first = place.driver()
    first.log(1, STEP | OVER)
    first.log(2, ROLLOUTS)
    log = place.log()
    assert (log.follow(is_over=True), log.last_step, place.steps()) == (0, 1, [1])
    log, second = place.log(), place.driver(2)
    second.log(2, STEP | OVER | {"train/reward": 0.75})
    assert log.follow() == 1
    assert [(line["step"], line["reward_mean"]) for line in place.lines()] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize(("measures", "kl"), [(True, 0.0), (False, None)])
def test_a_kl_of_zero_counts_only_where_a_reference_is_loaded(place, measures, kl):
    place.driver().log(1, STEP)
    log = place.log(measures)
    log.follow(is_over=True)
    assert place.lines()[0].get("kl") == kl


@pytest.mark.parametrize(("samples", "share"), [(32, 0.25), (None, None)])
def test_the_share_of_masked_samples_is_known_where_their_number_is(place, samples, share):
    place.driver().log(1, STEP | {"train/num_valid_samples": 24.0})
    place.log(samples=samples).follow(is_over=True)
    assert (place.lines()[0]["valid_samples"], place.lines()[0].get("masked_share")) == (24.0, share)


def test_rewards_are_told_by_environment_and_other_numbers_and_texts_are_left_aside(place):
    driver = place.driver()
    rewards = {"train/math/reward/mean": 1.0, "train/total_reward/mean": 0.75, "train/code/x/reward/mean": 0.5}
    others = {"train/math/length/mean": 9.0, "validation/math/reward/mean": 0.1, "ray/gpu": 1.0}
    driver.log(1, rewards | {"train/loss": 0.5} | others)
    driver.log(0, {"train/reward": 9.0})
    texts = make_tensor_proto(np.array([b"a text"], dtype=object))
    driver.write(1, Summary(value=[Summary.Value(tag="train/loss", tensor=texts)]))
    driver.write(1, Summary(value=[Summary.Value(tag="train/grad_norm", tensor=make_tensor_proto(np.float32(2.5)))]))
    place.log().follow(is_over=True)
    told = {"environment_rewards": {"math": 1.0, "code/x": 0.5}, "reward_mean": 0.75, "loss": 0.5, "grad_norm": 2.5}
    assert place.lines() == [{"step": 1} | told]


def test_a_step_that_is_trained_again_after_a_resume_is_logged_again_and_the_later_counts(place):
    first = place.driver()
    for step in (1, 2, 3):
        first.log(step, STEP | OVER)
    place.log().follow(is_over=True)
    log, second = place.log(), place.driver(2)
    assert len(place.lines()) == 3, "what an earlier attempt logged is not logged twice"
    for step in (3, 4):
        second.log(step, STEP | OVER | {"train/reward": 0.9})
    assert log.follow() == 2
    assert place.steps() == [1, 2, 3, 3, 4]
    assert [entry["reward_mean"] for entry in read_log(place.output)] == pytest.approx([0.5, 0.5, 0.9, 0.9])


def test_steps_that_a_driver_made_after_its_watch_was_killed_are_logged_by_the_next(place):
    driver = place.driver()
    driver.log(1, STEP | OVER)
    place.log().follow()
    driver.log(2, STEP | OVER)
    place.log()
    assert place.steps() == [1, 2]


class Writer:
    """NeMo-RL's own writer, used as its TensorboardLogger uses it."""

    def __init__(self, logs) -> None:
        tensorboard = pytest.importorskip("torch.utils.tensorboard")
        self.writer = tensorboard.SummaryWriter(log_dir=str(logs / "exp_001/tensorboard"))

    def log(self, step: int, prefix: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{prefix}/{name}", value, step)
        self.writer.flush()


GAP = {"loss": 0.1, "gen_kl_error": 0.001, "token_mult_prob_error": 1.01, "num_masked_seqs_by_logprob_error": 4}


def test_failed_and_unjudged_rollouts_are_shares_of_the_environment_with_most(place):
    driver = Writer(place.logs)
    verdicts = {
        "swe_agents/agent_timed_out/mean": 0.25,
        "swe_agents/eval_timed_out/mean": 0.5,
        "swe_agents/reward/mean": 0,
    }
    driver.log(1, "train", verdicts | {"mcqa/agent_timed_out/max": 1.0, "aalcr/invalid_judge_response/mean": 0.125})
    driver.log(1, "train", GAP | {"num_mask_sample_filtered": 8, "truncation_rate": 0.75})
    driver.log(2, "train", GAP)
    driver.log(3, "train", GAP | {"num_mask_sample_filtered": 24})
    place.log(samples=32).follow(is_over=True)
    shares = [[line.get(f"{name}_share") for name in ("failed", "unjudged", "mismatch")] for line in place.lines()]
    assert shares == [[0.5, 0.125, 0.125], [None, None, 0.125], [0.75, None, 0.125]]
    assert place.lines()[0]["truncation_rate"] == 0.75


@pytest.mark.parametrize(
    ("timing", "shares"),
    [
        (
            {"generation": 50, "prepare_for_generation/total": 10, "policy_training": 20, "training_prep": 5}
            | {"prepare_for_generation/transfer_and_update_weights": 8},
            {"generating_share": 0.5, "weights_share": 0.1, "training_share": 0.25},
        ),
        (
            {"exposed_generation": 30, "policy_and_reference_logprobs": 20, "policy_training": 30, "weight_sync": 5},
            {"waiting_share": 0.3, "training_share": 0.5, "weights_share": 0.05},
        ),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_the_shares_of_a_steps_time_leave_out_phases_inside_others_and_what_is_no_time(place, timing, shares):
    driver = Writer(place.logs)
    driver.log(1, "train", GAP)
    driver.log(1, "timing/train", timing | {"total_step_time": 100, "valid_tokens_per_sec_per_gpu": 9000})
    place.log().follow()
    (line,) = place.lines()
    assert {name: value for name, value in line.items() if name.endswith("_share")} == pytest.approx(shares)
    assert line["timing"] == timing


@pytest.mark.parametrize(
    "garbage",
    [
        {"gen_kl_error": 7.5},
        {"gen_kl_error": float("nan")},
        {"gen_kl_error": 0.0, "num_masked_seqs_by_logprob_error": 32},
    ],
    ids=["seen by the loss", "not a number", "masked out of the loss"],
)
def test_garbage_of_a_sampler_that_woke_up_wrong_ends_the_stage_at_its_first_step(place, garbage):
    settings = load_recipe(ROOT / "config/recipes/nano3.yaml").graph["rlvr"].settings
    driver, log = Writer(place.logs), place.log(samples=32)

    def train(step: int, values: dict[str, float]) -> None:
        driver.log(step, "train", GAP | values)
        driver.log(step, "timing/train", {"total_step_time": 100})
        log.follow()
        refuse_divergence("rlvr", settings.running_gate, TrainingFolder(place.output.parent), log.last_step)

    train(1, {})
    with pytest.raises(UserError, match=r"peak_\w+ is .*\(single steps\), first at step 2; mend .*traps 24 and 82"):
        train(2, garbage)
