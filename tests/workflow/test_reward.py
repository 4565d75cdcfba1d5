"""A reward model of one's own: it resumes to the same bits, keeps its head, and pays a policy for what it has read."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

from scripts.backends.protocol import write_job  # noqa: E402
from scripts.backends.trl import measuring  # noqa: E402
from scripts.backends.trl.algorithm import Dtensor  # noqa: E402
from scripts.backends.trl.checks import unfit_readers  # noqa: E402
from scripts.backends.trl.measuring import EndedTexts  # noqa: E402
from scripts.backends.trl.tokenization import lines_of, tokenize_answers  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.rows.chat_format import ChatFormat  # noqa: E402
from scripts.rows.examples import preference_of  # noqa: E402
from scripts.rows.prompts import as_chat, render  # noqa: E402
from scripts.sampling.judge import scores_by  # noqa: E402
from scripts.stage.publish import export_checkpoint, publish_checkpoint  # noqa: E402
from scripts.stage.rundir import Checkpoint  # noqa: E402
from scripts.stage.stage import Stage  # noqa: E402
from scripts.stage.tables import METRICS  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.ranks import StopAt  # noqa: E402
from tests.stages import Stages, checkpoint, checkpoint_record, logged, weights_hash  # noqa: E402
from tests.trials import break_weight  # noqa: E402

SFT_STEPS, STEPS = 60, 24
ROLE = "reward_model"


def small_recipe(folder):
    """The recipe tiny-rm on a smaller model and fewer rows."""
    recipe = yaml.safe_load((ROOT / "config/recipes/tiny-rm.yaml").read_text())
    recipe["model"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    for name, rows in {"sft": 600, "pairs": 500, "rlhf": 140}.items():
        recipe["blends"][name] |= {"rows": rows, "holdout": 40}
    recipe["stages"]["rm"]["policy"]["train_global_batch_size"] = 32
    recipe["stages"]["rlhf"]["grpo"] |= {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}
    path = folder / "tiny-rm.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The stages, and the checkpoint that the reward model and the policy start from."""
    folder = tmp_path_factory.mktemp("reward")
    made = Stages(folder, small_recipe(folder))
    train(made.job("sft", "sft", SFT_STEPS))
    made.parent = {"parent_model": checkpoint(folder / "sft", SFT_STEPS)}
    return made


@pytest.fixture(scope="module")
def straight(stages):
    """The run directory of an undisturbed training of the reward model."""
    job = stages.job("rm", "rm.straight", STEPS, planned=STEPS, **stages.parent)
    train(job)
    return job.run


@pytest.fixture(scope="module")
def export(stages, straight):
    """The reward model's export."""
    folder = stages.directory / "rm.export"
    publish_checkpoint(Checkpoint(STEPS, checkpoint(straight, STEPS)), folder / "ckpt", checkpoint_record("rm", STEPS))
    export_checkpoint(folder / "ckpt", folder / "hf", like=stages.parent["parent_model"])
    return folder / "hf/model"


def otherwise(job, **policy):
    """The job with other settings of the policy's placement."""
    policy = job.settings.policy.model_copy(update=policy)
    return replace(job, settings=job.settings.model_copy(update={"policy": policy}))


def held_out_pairs(stages):
    """The held-out pairs as whole conversations: the chosen, then the rejected."""
    for line in lines_of(stages.split("pairs").with_name("val-split.jsonl")):
        pair = preference_of(line.row)
        yield [as_chat([*pair.prompt, *answer]) for answer in pair.answers]


def test_a_reward_model_in_parts_or_interrupted_ends_with_the_same_bits(stages, straight):
    job = stages.job("rm", "rm.parts", STEPS, planned=STEPS, **stages.parent)
    train(replace(job, max_num_steps=1))
    train(replace(job, stop=StopAt(1, 7), resume_from=checkpoint(job.run, 1)))
    train(replace(job, resume_from=checkpoint(job.run, 7)))
    assert weights_hash(job.run, STEPS) == weights_hash(straight, STEPS)
    for key in ("lr", "loss", "accuracy", "tokens"):
        assert [step[key] for step in logged(job.run)] == [step[key] for step in logged(straight)]
    assert logged(job.run)[-1]["validation_accuracy"] == logged(straight)[-1]["validation_accuracy"]
    assert {"loss", "grad_norm", "lr", "accuracy", "validation_accuracy"} <= {*logged(straight)[-1]} <= {*METRICS.names}


def test_micro_batches_teach_a_reward_model_what_whole_batches_teach(stages, straight):
    job = otherwise(stages.job("rm", "rm.micro", STEPS, planned=STEPS, **stages.parent), train_micro_batch_size=8)
    train(job)
    first, second = (load_file(checkpoint(run, STEPS) / "model.safetensors") for run in (job.run, straight))
    assert all(torch.allclose(first[key], second[key], atol=1e-3) for key in first)


def test_an_export_keeps_its_head_and_scores_held_out_pairs_as_the_stage_did(stages, straight, export):
    model, tokenizer = (kind.from_pretrained(export) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert model.config.num_labels == 1 and type(model).__name__ == "LlamaForSequenceClassification"
    trained = load_file(checkpoint(straight, STEPS) / "model.safetensors")
    assert torch.equal(model.score.weight, trained["score.weight"]) and model.score.weight.shape[0] == 1

    def score(messages):
        tokens = tokenizer(render(messages, tokenizer), add_special_tokens=False, return_tensors="pt")
        return model(**tokens).logits.item()

    right = [score(chosen) > score(rejected) for chosen, rejected in held_out_pairs(stages)]
    accuracy = sum(right) / len(right)
    assert logged(straight)[-1]["validation_accuracy"] == pytest.approx(accuracy) and accuracy > 0.5


def test_a_reward_model_reads_a_response_as_it_read_answers_alone_or_in_a_padded_batch(stages, export):
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    lines = list(lines_of(stages.split("pairs")))[:12]
    trained_on = [row["chosen_ids"] for row in tokenize_answers(lines, tokenizer, 96, {}, joined=True)]
    texts = []
    for line in lines:
        pair = preference_of(line.row)
        asked = render(as_chat(pair.prompt), tokenizer, add_generation_prompt=True)
        texts.append(asked + pair.answers[0][0]["content"])  # a response as TRL decodes it, without special tokens
    options = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
    batch = EndedTexts(tokenizer)(text=texts, **options)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len({*lengths}) > 1
    assert [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)] == trained_on
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([ids])).logits.item() for ids in trained_on]
        assert model(**batch).logits[:, 0].tolist() == pytest.approx(alone, abs=1e-4)


def test_it_ranks_the_responses_of_a_generated_blend_as_it_scores_each_alone(stages, export):
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    pair = preference_of(next(lines_of(stages.split("pairs"))).row)
    texts = [pair.answers[0][0]["content"], pair.answers[1][0]["content"], "a much longer response than either"]
    row = {"responses_create_params": {"input": pair.prompt}}
    with torch.no_grad():
        alone = [
            model(
                **tokenizer(
                    render([*as_chat(pair.prompt), {"role": "assistant", "content": text}], tokenizer),
                    add_special_tokens=False,
                    return_tensors="pt",
                )
            ).logits.item()
            for text in texts
        ]
    scores = scores_by(export.parent / "record.json", "cpu", 1)(row, texts)
    assert scores == pytest.approx(alone, abs=1e-4) and len({*scores}) > 1


def rlhf(stages, export, run, steps, **grpo):
    """A job of the stage rlhf, paid by the reward model."""
    job = stages.job("rlhf", run, steps, planned=steps, roles={ROLE: export}, **stages.parent)
    values = job.config.values()
    values["grpo"] |= grpo
    return replace(job, config=training_config(values))


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_policy_is_paid_by_environment_and_reward_model_by_weight_and_resumes(stages, export, aggregation):
    weights = {"environment": 0.5, ROLE: 2.0}
    said = {"reward_weights": weights, "multi_objective_aggregation": aggregation}
    runs = []
    for name, parts in (("straight", [(3, None)]), ("parts", [(1, None), (3, 1)])):
        job = rlhf(stages, export, f"rlhf.{aggregation}.{name}", 3, **said)
        for last, start in parts:
            train(replace(job, max_num_steps=last, resume_from=start and checkpoint(job.run, start)))
        runs.append(job.run)
    assert weights_hash(runs[0], 3) == weights_hash(runs[1], 3)
    for step in logged(runs[0]):
        assert set(step) <= {*METRICS.names} and step["environment_rewards"]
        if len(step["environment_rewards"]) == 1:
            (earned,) = step["environment_rewards"].values()
            assert step["reward_mean"] == pytest.approx(0.5 * earned + 2 * step["reward_model_score"], abs=1e-4)


def test_a_policy_that_the_reward_model_alone_pays_asks_no_environment(stages, export, monkeypatch):
    monkeypatch.setattr("scripts.backends.trl.measuring.reward_groups", None)
    job = rlhf(stages, export, "rlhf.alone", 2)
    train(job)
    for step in logged(job.run):
        assert step["reward_mean"] == pytest.approx(step["reward_model_score"]) and not step["environment_rewards"]
        assert step["timing"]["rewards"] > 0


def test_a_reward_model_whose_scores_are_no_numbers_ends_the_training_with_one_message(stages, export, tmp_path):
    broken = shutil.copytree(export, tmp_path / "export")
    break_weight(broken / "model.safetensors", "score.weight")
    job = rlhf(stages, broken, "rlhf.broken", 2, reward_weights={"environment": 0.5, ROLE: 2.0})
    with pytest.raises(UserError, match=rf"reward_model: none of the step's 16 responses got a score .* {broken}"):
        train(job)


@pytest.mark.parametrize(("aggregation", "weight"), [("sum_then_normalize", 0.0), ("normalize_then_sum", 0.5)])
def test_a_response_whose_score_is_no_number_teaches_nothing_and_is_counted(
    stages, export, monkeypatch, capfd, aggregation, weight
):
    taught = []
    of_trl = measuring.MeasuringTrainer._generate_and_score_completions

    def scored(trainer, inputs):
        """TRL's rewards, once a reward model has given the first of each four responses no number."""
        model = trainer.reward_funcs[-1]
        forward = model.forward

        def broken(*arguments, **options):
            found = forward(*arguments, **options)
            found.logits[::4] = torch.tensor([[float("nan")], [float("inf")], [float("-inf")], [float("nan")]])
            return found

        monkeypatch.setattr(model, "forward", broken)
        output = of_trl(trainer, inputs)
        monkeypatch.setattr(model, "forward", forward)
        taught.append(output["advantages"])
        return output

    monkeypatch.setattr(measuring.MeasuringTrainer, "_generate_and_score_completions", scored)
    said = {"reward_weights": {"environment": weight, ROLE: 2.0}, "multi_objective_aggregation": aggregation}
    job = rlhf(stages, export, f"rlhf.some.{aggregation}.{weight}", 1, **said)
    train(job)
    (advantages,) = taught
    assert advantages.isfinite().all() and not advantages[::4].any() and advantages.any()
    (step,) = logged(job.run)
    assert step["unjudged_share"] == 0.25 and math.isfinite(step["reward_mean"])
    assert "4 of the step's 16 responses got no score that is a number" in capfd.readouterr().err


@pytest.mark.skipif("STAGECOACH_ALL_RANKS" not in os.environ, reason="STAGECOACH_ALL_RANKS is not set")
def test_two_processes_train_a_reward_model_and_are_paid_by_one_with_copies_and_with_shares(stages, straight, export):
    options, shares = {"nodes": 2, **stages.parent}, {"dtensor_cfg": Dtensor(enabled=True)}
    copies = [stages.job("rm", "rm.two", STEPS, planned=STEPS, **options)]
    copies.append(replace(rlhf(stages, export, "rlhf.two", 2), nodes=2))
    shared = [stages.job("rm", "rm.shares", STEPS, planned=STEPS, **options)]
    shared.append(replace(rlhf(stages, export, "rlhf.shares", 2), nodes=2))
    jobs = [*copies, *(otherwise(job, **shares) for job in shared)]
    files = [stages.directory / f"job{number}" for number in range(len(jobs))]
    for file, job in zip(files, jobs, strict=True):
        write_job(file, job)
    plan = stages.directory / "plan.json"
    plan.write_text(json.dumps([[str(file), None] for file in files]))
    command = [sys.executable, "-m", "tests.ranks", str(plan)]
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [subprocess.Popen([*command, rank, port], cwd=ROOT) for rank in ("0", "1")]
    assert [rank.wait(600) for rank in ranks] == [0, 0]
    for job in jobs[::2]:
        for one, other in zip(logged(straight), logged(job.run), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)
            assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0.04)
        assert logged(job.run)[-1]["validation_accuracy"] == logged(straight)[-1]["validation_accuracy"]
    for job in jobs[1::2]:
        for step in logged(job.run):
            assert step["reward_mean"] == pytest.approx(step["reward_model_score"]) and step["reward_model_score"] != 0


def test_a_reward_model_that_reads_otherwise_than_the_policy_writes_is_refused(stages, export, monkeypatch):
    stage, policy = Stage(stages.recipe, stages.directory, "rlhf"), ChatFormat.of(stages.parent["parent_model"])
    monkeypatch.setattr(Stage, "config", stages.job("rlhf", "rlhf.refused", 1).config)
    monkeypatch.setattr(Stage, "role_exports", {ROLE: export})
    assert [*unfit_readers(stage, policy)] == []
    (refusal,) = unfit_readers(stage, policy.with_template("{{ messages }}"))
    assert refusal.startswith("reward_model cannot read what the policy writes: the chat template (line 1 was ")
    monkeypatch.setattr(Stage, "role_exports", {ROLE: stages.parent["parent_model"]})
    (refusal,) = unfit_readers(stage, policy)
    assert refusal.startswith("reward_model cannot read what the policy writes: no head for rewards (")
