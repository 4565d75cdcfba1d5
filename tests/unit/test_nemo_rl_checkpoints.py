"""NeMo-RL's checkpoints: which are whole, how they are told apart, and what is kept out of its way."""

import json
import shutil

import pytest

from scripts.backends.nemo_rl.checkpoints import (
    MEGATRON,
    SMALL_BYTES,
    pass_over_newer,
    reason_unfinished,
    refuse_repeated_weights,
    seal_finished,
)
from scripts.errors import UserError
from scripts.stage.rundir import FILES, Checkpoint
from scripts.stage.training_folder import TrainingFolder

SHARD = f"{MEGATRON}/__0_0.distcp"


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def save(run, step: int, weights: bytes = b"", **files: bytes):
    """A checkpoint as NeMo-RL's Megatron writes it; `files` besides, with `__` for a slash."""
    path = run / f"checkpoints/step_{step}"
    (path / MEGATRON).mkdir(parents=True)
    (path / "training_info.json").write_text(json.dumps({"current_step": step}))
    (path / "config.yaml").write_text("policy: {}\n")
    (path / "train_dataloader.pt").write_bytes(b"rows")
    (path / "policy/weights/latest_checkpointed_iteration.txt").write_text("0")
    for name in ("run_config.yaml", "metadata.json"):
        (path / MEGATRON / name).write_text("{}\n")
    (path / SHARD).write_bytes(weights or b"weights of step %d" % step)
    for name, content in files.items():
        (path / MEGATRON / f"{name}.distcp").write_bytes(content)
    return path


def save_dcp(run, step: int):
    """A checkpoint as NeMo-RL's other trainer writes it."""
    path = save(run, step)
    shutil.rmtree(path / "policy/weights")
    (path / "policy/weights").mkdir()
    (path / "policy/weights/__0_0.distcp").write_bytes(b"weights")
    return path


def test_a_whole_checkpoint_is_whole(run):
    assert reason_unfinished(save(run, 2)) is None
    assert reason_unfinished(save_dcp(run, 4)) is None


@pytest.mark.parametrize("prefix", ["tmp_", "old_"])
def test_what_is_being_written_or_replaced_is_not_whole(run, prefix):
    path = save(run, 2)
    path.with_name(f"{prefix}step_2").mkdir()
    assert reason_unfinished(path) == f"{prefix}step_2 stands beside it"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("training_info.json", None, "training_info.json or config.yaml cannot be read"),
        ("training_info.json", "{", "training_info.json or config.yaml cannot be read"),
        ("config.yaml", "a: [", "training_info.json or config.yaml cannot be read"),
        ("config.yaml", None, "training_info.json or config.yaml cannot be read"),
        ("train_dataloader.pt", None, "train_dataloader.pt is missing"),
        (f"{MEGATRON}/run_config.yaml", None, f"{MEGATRON}/run_config.yaml is missing"),
        (f"{MEGATRON}/metadata.json", None, f"{MEGATRON}/metadata.json is missing"),
    ],
)
def test_each_part_that_is_missing_or_cut_is_named(run, file, content, why):
    path = save(run, 2)
    (path / file).unlink() if content is None else (path / file).write_text(content)
    assert reason_unfinished(path).startswith(why)
    assert seal_finished(TrainingFolder(run)) == [] and not (path / FILES).exists()


def test_weights_that_are_not_there_are_missed(run):
    megatron, other = save(run, 2), save_dcp(run, 4)
    shutil.rmtree(megatron / MEGATRON)
    assert reason_unfinished(megatron) == f"{MEGATRON}/run_config.yaml is missing"
    (other / "policy/weights/__0_0.distcp").unlink()
    assert reason_unfinished(other) == "policy/weights is empty"


def test_several_data_loaders_are_as_good_as_one(run):
    path = save(run, 2)
    (path / "train_dataloader.pt").rename(path / "train_dataloader_math.pt")
    assert reason_unfinished(path) is None


def test_every_whole_checkpoint_is_sealed_once_in_order(run):
    for step in (10, 2, 4):
        save(run, step)
    (run / "checkpoints/tmp_step_12").mkdir()
    (run / "checkpoints/step_last").mkdir()
    assert [checkpoint.step for checkpoint in seal_finished(TrainingFolder(run))] == [2, 4, 10]
    assert seal_finished(TrainingFolder(run)) == []
    save(run, 12)
    assert seal_finished(TrainingFolder(run)) == [], "tmp_step_12 stands beside it"
    assert TrainingFolder(run).newest_checkpoint().step == 10


def test_small_files_and_the_largest_shard_are_hashed_and_all_are_measured(run):
    big, bigger = bytes(SMALL_BYTES + 1), bytes(SMALL_BYTES + 2)
    path = save(run, 2, weights=big, __1_0=bigger)
    (path / "policy/optimizer").mkdir()
    (path / "policy/optimizer/__0_0.distcp").write_bytes(bytes(SMALL_BYTES + 3))
    seal_finished(TrainingFolder(run))
    files = json.loads((path / FILES).read_text())
    assert files[SHARD] == {"bytes": SMALL_BYTES + 1, "sha256": None}
    assert files[f"{MEGATRON}/__1_0.distcp"]["sha256"] is not None
    assert files["policy/optimizer/__0_0.distcp"]["sha256"] is None, "the weights' shards are compared"
    assert files["training_info.json"]["sha256"] is not None
    assert Checkpoint.at(path).damage() is None
    (path / SHARD).write_bytes(b"cut")
    assert Checkpoint.at(path).damage() == f"{SHARD} has 3 bytes instead of {SMALL_BYTES + 1}"


def test_weights_that_repeat_those_before_are_refused_and_others_are_not(run):
    for step in (2, 4):
        save(run, step)
    seal_finished(TrainingFolder(run))
    refuse_repeated_weights(TrainingFolder(run))
    save(run, 6, weights=b"weights of step 4")
    seal_finished(TrainingFolder(run))
    with pytest.raises(
        UserError, match=rf"repeated_step_6.1: {SHARD} is byte for byte that of step_4, .*NeMo-RL issue 3312"
    ):
        refuse_repeated_weights(TrainingFolder(run))
    assert TrainingFolder(run).newest_checkpoint().step == 4, "nothing resumes from it"


def test_a_small_shard_that_never_changes_is_no_alarm(run):
    for step in (2, 4):
        save(run, step, __9_0=b"const")
    seal_finished(TrainingFolder(run))
    refuse_repeated_weights(TrainingFolder(run))


def test_one_checkpoint_alone_or_one_just_removed_is_compared_with_nothing(run):
    save(run, 2)
    seal_finished(TrainingFolder(run))
    refuse_repeated_weights(TrainingFolder(run))
    save(run, 4, weights=b"weights of step 2")
    seal_finished(TrainingFolder(run))
    training = TrainingFolder(run)
    shutil.rmtree(training.checkpoints[0].path)
    refuse_repeated_weights(training)


def test_what_is_newer_than_the_step_to_resume_from_is_moved_away_and_kept(run):
    for step in (2, 4, 6):
        save(run, step)
    seal_finished(TrainingFolder(run))
    pass_over_newer(TrainingFolder(run), run / "checkpoints/step_4")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["passed_over_step_6.1", "step_2", "step_4"]
    save(run, 6)
    pass_over_newer(TrainingFolder(run), run / "checkpoints/step_4")
    pass_over_newer(TrainingFolder(run), None)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["passed_over_step_2.1", "passed_over_step_4.1", "passed_over_step_6.1", "passed_over_step_6.2"]
    assert TrainingFolder(run).checkpoints == [], "NeMo-RL and we start from the same step"
