"""Rows in an order of the stage's seed: new in every epoch, the same after a resume and in any number of processes."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from scripts.backends.protocol import write_job  # noqa: E402
from scripts.backends.trl import measuring  # noqa: E402
from scripts.backends.trl.algorithm import Lora  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.files import sha256_file, write_json  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.stages import Stages, checkpoint, logged, weights_hash  # noqa: E402
from tests.workflow.test_multinode import free_port  # noqa: E402

ROWS, BATCH = 18, 8
STEPS = 6  # 48 rows: the third epoch begins within the fifth step
STOP = 4  # the second epoch ends with row 36, within the next step
BLENDS = {"sft": "sft", "dpo": "pairs", "kto": "answers", "text": "text"}


class FewRows(Stages):
    """Stages whose splits are short enough for three epochs in a few steps."""

    def __init__(self, directory):
        super().__init__(directory, ROOT / "tests/algorithms.yaml")
        for blend in BLENDS.values():
            split = self.split(blend)
            few = split.read_text().splitlines(keepends=True)[:ROWS]
            split.write_text("".join(few))
            described = {"rows": ROWS, "sha256": sha256_file(split)}
            write_json(split.with_name("manifest.json"), {"train": described, "validation": described})

    def shuffled(self, stage, run, steps=STEPS, seed=3, shuffle=True, **options):
        """A job whose rows are shuffled by the seed, in steps of the same number of rows for every algorithm."""
        job = self.job(stage, run, steps, planned=STEPS, **options)
        values = job.config.values() | {"seed": seed}
        values["data"] = {**values.get("data", {}), "shuffle": shuffle}
        if stage == "text":
            values["grpo"] |= {"num_prompts_per_step": BATCH}
        else:
            values["policy"] |= {"train_global_batch_size": BATCH}
        return replace(job, config=training_config(values))


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The stages, with a policy that the others start from."""
    made = FewRows(tmp_path_factory.mktemp("shuffle"))
    train(made.job("sft", "start", 2))
    made.parent = {"parent_model": checkpoint(made.directory / "start", 2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "reward_groups", lengths)
        yield made


def lengths(groups, places=(), told=None):
    """Rewards that differ even where nothing was learnt."""
    return [[float(len(response)) for response in responses] for _, responses in groups]


@pytest.fixture(
    scope="module", params=["sft", *(pytest.param(name, marks=pytest.mark.long) for name in ("dpo", "kto", "text"))]
)
def straight(request, stages):
    """A stage's name, and its training without an interruption."""
    job = stages.shuffled(request.param, f"{request.param}.straight", **stages.parent)
    train(job)
    return request.param, job.run


def test_a_training_that_stops_within_the_second_epoch_ends_with_the_same_bits(stages, straight):
    name, run = straight
    job = stages.shuffled(name, f"{name}.parts", **stages.parent)
    train(replace(job, max_num_steps=STOP))
    train(replace(job, resume_from=checkpoint(job.run, STOP)))
    assert weights_hash(job.run, STEPS) == weights_hash(run, STEPS)
    assert [step["tokens"] for step in logged(job.run)] == [step["tokens"] for step in logged(run)]


def test_the_order_of_the_file_and_of_another_seed_train_other_weights(stages, straight):
    name, run = straight
    hashes = {weights_hash(run, STEPS)}
    for other, options in {"unshuffled": {"shuffle": False}, "seed": {"seed": 4}}.items():
        job = stages.shuffled(name, f"{name}.{other}", **options, **stages.parent)
        train(job)
        hashes.add(weights_hash(job.run, STEPS))
    assert len(hashes) == 3


@pytest.mark.parametrize("lora", [None, {"dim": 2, "dropout": 0.0}])
@pytest.mark.parametrize(
    "name", ["sft", *(pytest.param(name, marks=pytest.mark.long) for name in ("dpo", "kto", "text"))]
)
def test_two_seeds_train_other_weights_exactly_where_the_settings_say_that_something_is_drawn(stages, name, lora):
    settings = stages.recipe.stages[name]
    lora = lora and Lora(**lora)
    settings = settings.model_copy(update={"policy": settings.policy.model_copy(update={"lora": lora})})
    hashes = set()
    for seed in (3, 4):
        run = f"{name}.{'lora' if lora else 'all'}.{seed}"
        job = stages.shuffled(name, run, 2, seed=seed, shuffle=False, **stages.parent)
        values = job.config.values()
        values["policy"] |= {"lora": lora.model_dump()} if lora else {}
        train(replace(job, config=training_config(values)))
        weights = "adapter_model.safetensors" if lora else "model.safetensors"
        hashes.add(sha256_file(checkpoint(job.run, 2) / weights))
    draws = settings.draws_by_seed(is_fresh=False)
    assert (len(hashes) == 2) == draws
    assert draws == (lora is not None or name == "text")


def test_a_stage_that_continues_begins_a_shuffled_epoch_of_its_own(stages):
    parent = stages.shuffled("sft", "sft.parent", **stages.parent)
    train(parent)
    last = STEPS + 3
    job = stages.shuffled("sft", "sft.on", last, **stages.parent)
    values = job.config.values()
    values["sft"]["max_num_steps"] = last
    job = replace(job, config=training_config(values), resume_from=checkpoint(parent.run, STEPS), begun=STEPS)
    train(job)
    tokens = [step["tokens"] for step in logged(job.run)]
    assert tokens == [step["tokens"] for step in logged(parent.run)[:3]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_two_processes_take_the_rows_that_one_takes(stages, name):
    alone = stages.shuffled(name, f"{name}.alone", **stages.parent)
    train(alone)
    two = stages.shuffled(name, f"{name}.two", nodes=2, **stages.parent)
    parts = stages.shuffled(name, f"{name}.two.parts", nodes=2, **stages.parent)
    jobs = [
        two,
        replace(parts, max_num_steps=STOP),
        replace(parts, resume_from=checkpoint(parts.run, STOP)),
    ]
    plan = []
    for number, job in enumerate(jobs):
        file = stages.directory / f"{name}.{number}.job"
        write_job(file, job)
        plan.append([str(file), None])
    (stages.directory / "plan.json").write_text(json.dumps(plan))
    port = str(free_port())
    command = [sys.executable, "-m", "tests.ranks", stages.directory / "plan.json"]
    ranks = [subprocess.Popen([*command, rank, port], cwd=ROOT) for rank in ("0", "1")]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    for one, other in zip(logged(alone.run), logged(two.run), strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3), f"step {one['step']}"
    assert weights_hash(parts.run, STEPS) == weights_hash(two.run, STEPS)
