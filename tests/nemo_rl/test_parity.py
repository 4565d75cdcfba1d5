"""NeMo-RL's real loops on a CPU and the stand-in, on the same schedules: ends, checkpoints, lines and steps are the same.

Real are the release's drivers, loops, loss, data loader, replay buffer, checkpoints, logger, Gym and Ray; its policy and
its generator are classes for the CPU. A start takes a minute, so this runs where it is asked for.
"""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from scripts.backends.nemo_rl.checkpoints import lay_in
from scripts.backends.nemo_rl.export import WORKER, convert
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.recipe.load import load_recipe, load_site
from scripts.stage.publish import publish_checkpoint
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT
from tests.nemo_rl.loops import Real, StandIn, Start, write_inputs
from tests.production import CHECKOUTS, PYTHON, needs_nemo_rl
from tests.stages import checkpoint_record

RELEASE = "v0.7.0"
REPORT = os.environ.get("STAGECOACH_PARITY_REPORT")
BATCHES = 5
SCHEDULES = {
    "fresh": [Start(most=2)],
    "deadline": [Start(at_once=True)],
    "killed in a save and resumed twice": [Start(fault=("die", 2)), Start(at_once=True), Start()],
    "end of data and resumed": [Start(), Start(most=6)],
    "exception": [Start(fault=("raise", 2))],
    "weights not taken": [Start(fault=("refit", 0))],
    "killed in a save of the second epoch and resumed": [
        Start(most=7, fault=("die", 6), epochs=2),
        Start(most=7, epochs=2),
    ],
}
PAIRS = [
    (kind, name)
    for kind in ("sync", "async", "dpo", "sft")
    for name in SCHEDULES
    if name != ("weights not taken" if kind in ("dpo", "sft") else "killed in a save of the second epoch and resumed")
]

pytestmark = needs_nemo_rl


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model and rows for a few steps."""
    directory = tmp_path_factory.mktemp("parity")
    write_inputs(directory, BATCHES)
    return directory


@pytest.fixture(scope="module")
def stand_in(inputs):
    """The stand-in."""
    return StandIn(inputs, RELEASE)


@pytest.fixture(scope="module")
def real(inputs):
    """The release's own loops."""
    with Real(inputs, Path(CHECKOUTS, RELEASE).resolve(), Path(PYTHON).absolute()) as loops:
        yield loops


@pytest.mark.parametrize(("kind", "schedule"), PAIRS)
def test_the_stand_in_does_as_the_real_loop(inputs, real, stand_in, kind, schedule):
    found = {}
    for loops in (stand_in, real):
        run = inputs / "runs" / type(loops).__name__ / kind / schedule.replace(" ", "-")
        found[type(loops).__name__] = [loops.train(kind, start, run) for start in SCHEDULES[schedule]]
    if REPORT:
        with Path(REPORT).open("a") as file:
            file.write(json.dumps({"kind": kind, "schedule": schedule} | found) + "\n")
    assert found["StandIn"] == found["Real"]
    assert found["Real"][-1]["reached"] or schedule == "weights not taken", "a start that does nothing compares nothing"


@pytest.mark.parametrize("kind", ["sync", "sft"])
def test_the_real_loop_goes_on_with_a_parents_checkpoint_at_its_own_first_row(inputs, real, kind):
    runs = inputs / "continued" / kind
    assert real.train(kind, Start(most=2), runs / "parent")["loader"]["rows"] == 4
    (runs / "child/checkpoints").mkdir(parents=True)
    lay_in(
        TrainingFolder(runs / "child"),
        TrainingFolder(runs / "parent").newest_checkpoint(),
        SimpleNamespace(is_asynchronous=False),
    )
    child = real.train(kind, Start(most=4), runs / "child")
    assert child["lines"] == [3, 4] and child["sealed"][-1] == 4
    assert child["info"]["total_steps"] == 4 and child["loader"]["rows"] == 4, "of the child's own"


SFT_RECIPE = """\
name: real
release: v0.7.0
model: {{name: {0}/model}}
source: {{kind: folder, path: {0}}}
blends: {{chats: {{kind: demonstrations, file: chats.jsonl, holdout: 2}}}}
stages:
  sft:
    {{backend: nemo_rl, algorithm: sft, blend: chats, entry: examples/run_sft.py, config: examples/configs/sft.yaml,
      cluster: {{num_nodes: 1}}, policy: {{train_global_batch_size: 2, max_total_sequence_length: 96}}}}
"""


def test_what_the_real_loop_of_sft_leaves_is_published_and_exported(inputs, real, monkeypatch):
    from safetensors.torch import load_file

    (inputs / "real.yaml").write_text(SFT_RECIPE.format(inputs))
    stage = Stage(load_recipe(inputs / "real.yaml"), inputs / "results", "sft")
    run = stage.paths.ckpt.parent / "run"
    assert real.train("sft", Start(most=2), run)["sealed"] == [1, 2]
    publish_checkpoint(TrainingFolder(run).newest_checkpoint(), stage.paths.ckpt, checkpoint_record("sft", 2))
    venvs = inputs / "venvs"
    venvs.mkdir()
    (venvs / WORKER).symlink_to(Path(PYTHON).absolute().parents[1])

    def here(self, command, log):
        """In the container's place: this machine."""
        own = {"HOME": str(inputs), "PATH": os.environ["PATH"], "NEMO_RL_VENV_DIR": str(venvs)}
        subprocess.run(
            command, cwd=self.checkout, env=self.environment | own | {"PYTHONPATH": str(self.checkout)}, check=True
        )

    monkeypatch.setattr(Runtime, "run", here)
    site = load_site(ROOT / "config/sites/h100.yaml", stage.recipe)
    checkouts = {"checkouts": {RELEASE: str(real.checkout)}, "cache": str(inputs / "cache")}
    convert(stage, site.model_copy(update={"nemo_rl": site.nemo_rl.model_copy(update=checkouts)}), inputs / "log")
    model = stage.paths.export_record.parent / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in (inputs / "model", model))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    assert AutoTokenizer.from_pretrained(model).chat_template
