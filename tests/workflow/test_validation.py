"""The held-out rows of written answers: exact figures, at the right steps, and a training that they leave as it is."""

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy, logsigmoid  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402

from scripts.backends.protocol import write_job  # noqa: E402
from scripts.backends.trl.algorithm import Dtensor  # noqa: E402
from scripts.backends.trl.offline_trainers import with_others  # noqa: E402
from scripts.backends.trl.tokenization import IGNORED, preparation_of  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.backends.trl.validation import held_out  # noqa: E402
from scripts.files import sha256_file  # noqa: E402
from scripts.model.loading import load_model  # noqa: E402
from scripts.model.processor import load_processor  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.recipe.stage_settings import Checkpointing  # noqa: E402
from scripts.stage.stopping import ending_in, published_of  # noqa: E402
from scripts.stage.training_folder import TrainingFolder  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.ranks import StopAt  # noqa: E402
from tests.stages import Stages, checkpoint, measured, weights_hash  # noqa: E402

SFT_STEPS, STEPS = 20, 6
ALGORITHMS = ["sft", "dpo", "kto", "rm"]
OFF = {"val_at_start": False, "val_at_end": False}
OFTEN = {"val_period": 2}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The stages, and the checkpoint that all but the first start from."""
    made = Stages(tmp_path_factory.mktemp("validation"), ROOT / "tests/alone.yaml")
    train(made.job("sft", "parent", SFT_STEPS))
    made.parent = {"parent_model": checkpoint(made.directory / "parent", SFT_STEPS)}
    return made


def job_of(stages, name, run, micro=None, **validation):
    """A stage's job of STEPS steps, with settings of its validation."""
    job = stages.job(name, run, STEPS, planned=STEPS, **stages.parent)
    settings = job.settings
    section = settings.section.model_copy(update=validation)
    policy = settings.policy.model_copy(update={"train_micro_batch_size": micro})
    settings = settings.model_copy(update={settings.algorithm: section, "policy": policy})
    return replace(job, settings=settings)


@pytest.fixture(scope="module", params=ALGORITHMS)
def trained(request, stages):
    """A stage's name, and its job after a training that measured the held-out rows before, during and after."""
    job = job_of(stages, request.param, f"{request.param}.often", **OFTEN)
    train(job)
    return request.param, job


def test_the_rows_are_measured_before_the_first_step_regularly_and_after_the_last(trained):
    name, job = trained
    found = measured(job.run)
    assert [entry["step"] for entry in found] == [0, 2, 4, 6]
    columns = {"validation_loss", "validation_rows"} | ({"validation_margin"} if name != "sft" else set())
    columns |= {"validation_accuracy"} if name in ("dpo", "rm") else set()
    for entry in found:
        assert {key for key in entry if key.startswith("validation_")} == columns
        assert entry["validation_rows"] == (20 if name == "sft" else 10)
    if name == "dpo":
        assert found[0]["validation_loss"] == pytest.approx(0.6931, abs=1e-4) and found[0]["validation_margin"] == 0
    if name == "sft":
        assert found[-1]["validation_loss"] != found[0]["validation_loss"]


def test_measuring_leaves_the_training_as_it_is_to_the_bit_also_over_a_kill_and_a_resume(stages, trained):
    name, often = trained
    without = job_of(stages, name, f"{name}.without", **OFF)
    train(without)
    assert not measured(without.run)
    assert weights_hash(without.run, STEPS) == weights_hash(often.run, STEPS)
    parts = job_of(stages, name, f"{name}.parts", **OFTEN)
    train(replace(parts, stop=StopAt(0, 3)))
    train(replace(parts, resume_from=checkpoint(parts.run, 3)))
    assert weights_hash(parts.run, STEPS) == weights_hash(often.run, STEPS)
    figures = [{key: entry[key] for key in entry if key[:4] in ("step", "vali")} for entry in measured(parts.run)]
    straight = [{key: entry[key] for key in entry if key[:4] in ("step", "vali")} for entry in measured(often.run)]
    assert figures == straight


def test_the_figures_are_of_all_rows_whatever_the_micro_batches(stages, trained):
    name, whole = trained
    micro = job_of(stages, name, f"{name}.micro", micro=2, **OFTEN)
    train(replace(micro, max_num_steps=1))  # of the first step, for later ones differ by the training's own rounding
    first, expected = measured(micro.run)[0], measured(whole.run)[0]
    for key in expected:
        assert first[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6)


def test_the_loss_after_the_last_step_is_what_plain_torch_computes_row_by_row(stages, trained):
    name, job = trained
    folder = checkpoint(job.run, STEPS)
    rows = held_out(job, load_processor(folder))
    found = measured(job.run)[-1]
    expected = {"sft": plain_sft, "dpo": plain_dpo, "kto": plain_kto, "rm": plain_reward}[name](stages, job, rows)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@torch.no_grad()
def log_likelihood(model, prompt, answer):
    """The sum of an answer's log-likelihoods, of one row without padding."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return -cross_entropy(logits.double(), torch.tensor(answer), reduction="sum").item()


@torch.no_grad()
def plain_sft(stages, job, rows):
    model, nats, tokens = load_model(checkpoint(job.run, STEPS)).eval(), 0.0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        nats += cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
        tokens += (labels != IGNORED).sum().item()
    return {"validation_loss": nats / tokens}


def policy_and_reference(stages, job):
    return load_model(checkpoint(job.run, STEPS)).eval(), load_model(stages.parent["parent_model"]).eval()


def plain_dpo(stages, job, rows):
    models = policy_and_reference(stages, job)
    beta, margins = job.config.dpo.reference_policy_kl_penalty, []
    for row in rows:
        chosen, rejected = (
            log_likelihood(models[0], row["prompt_ids"], row[key])
            - log_likelihood(models[1], row["prompt_ids"], row[key])
            for key in ("chosen_ids", "rejected_ids")
        )
        margins.append(beta * (chosen - rejected))
    margins = torch.tensor(margins, dtype=torch.float64)
    return {
        "validation_loss": -logsigmoid(margins).mean().item(),
        "validation_accuracy": (margins > 0).double().mean().item(),
        "validation_margin": margins.mean().item(),
    }


def plain_kto(stages, job, rows):
    models, kto = policy_and_reference(stages, job), job.config.kto
    beta = kto.reference_policy_kl_penalty

    def ratio(row, key):
        policy, reference = (log_likelihood(model, row["prompt_ids"], row[key]) for model in models)
        return policy - reference

    rows = with_others(rows, len(rows))
    kl = max(0.0, sum(ratio(row, "KL_completion_ids") for row in rows) / len(rows))
    losses, rewards = [], {True: [], False: []}
    for row in rows:
        value, is_wanted = ratio(row, "completion_ids"), row["label"]
        rewards[is_wanted].append(beta * value)
        distance = torch.tensor(value - kl if is_wanted else kl - value, dtype=torch.float64)
        weight = kto.desirable_weight if is_wanted else kto.undesirable_weight
        losses.append(weight * (1 - torch.sigmoid(beta * distance)).item())
    wanted, unwanted = (sum(rewards[kind]) / len(rewards[kind]) for kind in (True, False))
    return {"validation_loss": sum(losses) / len(losses), "validation_margin": wanted - unwanted}


@torch.no_grad()
def plain_reward(stages, job, rows):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint(job.run, STEPS)).eval()
    margins = torch.tensor(
        [
            model(input_ids=torch.tensor([row["chosen_ids"]])).logits.item()
            - model(input_ids=torch.tensor([row["rejected_ids"]])).logits.item()
            for row in rows
        ],
        dtype=torch.float64,
    )
    return {
        "validation_loss": -logsigmoid(margins).mean().item(),
        "validation_accuracy": (margins > 0).double().mean().item(),
        "validation_margin": margins.mean().item(),
    }


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_measuring_draws_no_random_numbers_from_the_dropout_of_adapters(stages, name):
    runs = []
    for run, validation in (("with", OFTEN), ("without", OFF)):
        job = job_of(stages, name, f"{name}.adapters.{run}", **validation)
        values = job.config.values()
        values["policy"]["lora"] = {"dim": 4, "dropout": 0.3}
        train(replace(job, config=training_config(values)))
        runs.append(job.run)
    hashes = [sha256_file(checkpoint(run, STEPS) / "adapter_model.safetensors") for run in runs]
    assert hashes[0] == hashes[1]
    first = measured(runs[0])[0]
    if name == "dpo":  # the reference is the policy without its adapters, which are 0 at the start
        assert first["validation_loss"] == pytest.approx(0.6931, abs=1e-4)


def test_a_batch_of_held_out_rows_has_the_rows_of_a_step(stages):
    job = job_of(stages, "sft", "sft.some", val_batches=1)
    train(replace(job, max_num_steps=1))
    assert [entry["validation_rows"] for entry in measured(job.run)] == [16]
    _, prepare = preparation_of(job.config, load_processor(stages.parent["parent_model"]))
    assert len(held_out(job, prepare.keywords["processor"])) == 16


LAST = 40


def stopping(stages, run):
    """A job of SFT that ends once its held-out rows gain less than 0.5 in two steps."""
    job = stages.job("sft", run, LAST, planned=LAST)
    stop_when = {"patience": 1, "min_change": 0.5, "val_period": 2, "val_batches": -1}
    return replace(job, config=training_config(job.config.values() | {"stop_when": stop_when}))


def newest(job):
    return job.training.newest_checkpoint()


def test_a_training_that_its_held_out_rows_end_ends_alike_after_a_kill_or_a_stop(stages):
    straight = stopping(stages, "stopping")
    train(straight)
    ending = ending_in(TrainingFolder(straight.run), straight.config.stopping, LAST, LAST)
    found = {entry["step"]: entry["validation_loss"] for entry in measured(straight.run)}
    assert 4 <= ending.last < LAST and ending.last == max(found) == newest(straight).step
    assert found[ending.last] > found[ending.last - 2] - 0.5 and ending.value == min(list(found.values())[1:])
    assert [each.step for each in TrainingFolder(straight.run).checkpoints] == list(range(2, ending.last + 1, 2))
    parts = stopping(stages, "stopping.parts")
    train(replace(parts, stop=StopAt(0, 3)))
    train(replace(parts, resume_from=newest(parts).path))
    shutil.rmtree(newest(parts).path)  # killed after the last measurement, before its checkpoint was sealed
    train(replace(parts, resume_from=newest(parts).path))
    assert ending_in(TrainingFolder(parts.run), parts.config.stopping, LAST, LAST) == ending
    assert newest(parts).step == ending.last
    assert weights_hash(parts.run, ending.last) == weights_hash(straight.run, ending.last)
    assert weights_hash(parts.run, ending.best) == weights_hash(straight.run, ending.best)


def test_the_best_checkpoint_is_kept_until_the_end(stages):
    job = stopping(stages, "stopping.pruned")
    few = job.settings.model_copy(update={"checkpointing": Checkpointing(save_period=1000, keep_last_k=1)})
    worse = job.config.values()
    worse["stop_when"] |= {"metric": "validation_loss", "patience": 2}
    worse["policy"]["optimizer"] |= {"lr": 0.3, "schedule": "constant"}  # leaves the best behind
    job = replace(job, settings=few, config=training_config(worse))
    train(job)
    ending = ending_in(job.training, job.config.stopping, LAST, LAST)
    assert ending.best < ending.last
    assert [each.step for each in job.training.checkpoints] == [ending.best, ending.last]
    (kept,) = (each for each in job.training.checkpoints if each.step == ending.best)
    assert published_of(job.training, job.config.stopping, ending, newest(job)) == kept


def test_two_processes_with_copies_or_shares_measure_what_one_does(stages):
    expected, jobs = {}, []
    for name in ALGORITHMS:
        one = job_of(stages, name, f"{name}.one")
        train(replace(one, max_num_steps=1))
        expected[name] = measured(one.run)
        for kind in ("copies", "shares"):
            job = job_of(stages, name, f"{name}.{kind}", micro=4 if name == "sft" else None)
            policy = job.settings.policy.model_copy(update={"dtensor_cfg": Dtensor(enabled=kind == "shares")})
            settings = job.settings.model_copy(update={"policy": policy})
            jobs.append(replace(job, settings=settings, nodes=2, max_num_steps=1))
    jobs.sort(key=lambda job: job.settings.policy.dtensor_cfg.enabled)  # those with shares last
    files = [stages.directory / f"ranks.{number}" for number in range(len(jobs))]
    for file, job in zip(files, jobs, strict=True):
        write_job(file, job)
    plan = stages.directory / "plan.json"
    plan.write_text(json.dumps([[str(file), None] for file in files]))
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    command = [sys.executable, "-m", "tests.ranks", str(plan)]
    ranks = [subprocess.Popen([*command, rank, port], cwd=ROOT) for rank in ("0", "1")]
    assert [rank.wait(600) for rank in ranks] == [0, 0]
    for job in jobs:
        (first,), (found,) = expected[job.stage][:1], measured(job.run)[:1]
        assert found.keys() == first.keys()
        for key, value in first.items():
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (job.run.name, key)
