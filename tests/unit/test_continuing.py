"""Stages that go on with their parent's optimizer: what is refused, and NeMo-RL's checkpoint laid into the run."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from scripts.backends.nemo_rl.checkpoints import lay_in, seal_finished, sure_step
from scripts.stage.training_folder import TrainingFolder
from tests.unit.test_nemo_rl_checkpoints import save


@pytest.fixture
def parent(tmp_path):
    """The run of a parent with a sealed checkpoint of step 4, whose loader has given out six batches."""
    run = tmp_path / "parent"
    path = save(run, 4)
    (path / "training_info.json").write_text(
        json.dumps({"current_step": 4, "current_epoch": 1, "total_steps": 4, "consumed_samples": 32})
    )
    config = {
        "grpo": {"num_prompts_per_step": 2, "async_grpo": {"max_trajectory_age_steps": 1}},
        "data": {"train": {"dataset_name": "NemoGymDataset", "data_path": "rows.jsonl"}},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    torch.save({"_iterator_finished": False, "_num_yielded": 6}, path / "train_dataloader.pt")
    torch.save({"target_weight_versions": [4, 4]}, path / "replay_buffer.pt")
    seal_finished(TrainingFolder(run))
    return TrainingFolder(run).newest_checkpoint()


@pytest.mark.parametrize(("is_asynchronous", "current"), [(False, 0), (True, 4)])
def test_a_parents_checkpoint_is_laid_in_with_rows_that_begin_anew(parent, tmp_path, is_asynchronous, current):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    laid = lay_in(TrainingFolder(run), parent, SimpleNamespace(is_asynchronous=is_asynchronous))
    assert TrainingFolder(run).newest_checkpoint() == laid and laid.step == 4
    assert not (laid.path / "replay_buffer.pt").exists()
    info = json.loads((laid.path / "training_info.json").read_text())
    assert info == {"current_step": current, "current_epoch": 0, "total_steps": 4, "consumed_samples": 32}
    assert json.loads((parent.path / "training_info.json").read_text())["current_epoch"] == 1, "the parent's stays"
    weights = next(path for path in (laid.path / "policy").rglob("*") if path.is_file())
    assert weights.samefile(parent.path / weights.relative_to(laid.path))
    assert sure_step(parent, rows=16) < sure_step(laid, rows=16) == 4 + 16 // 2 - 2
    before = sorted(run.rglob("*"))
    assert (
        lay_in(TrainingFolder(run), parent, SimpleNamespace(is_asynchronous=is_asynchronous)) == laid
        and sorted(run.rglob("*")) == before
    )
