"""Every algorithm of backend trl: what it hands to TRL, that it resumes to the same bits, and what it logs."""

import json
import random
import statistics
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from datasets import Dataset  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trl import SFTConfig  # noqa: E402

from scripts.backends.trl import measuring  # noqa: E402
from scripts.backends.trl.measuring import leave_one_out  # noqa: E402
from scripts.backends.trl.offline import Dpo, Mpo  # noqa: E402
from scripts.backends.trl.offline_trainers import losses, make_reward_trainer, with_others  # noqa: E402
from scripts.backends.trl.placing import check_shares  # noqa: E402
from scripts.backends.trl.setup import shared_arguments  # noqa: E402
from scripts.backends.trl.tokenization import Line, tokenize_answers  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.evaluate.score import rollouts  # noqa: E402
from scripts.files import sha256_file, write_json  # noqa: E402
from scripts.model.loading import load_model  # noqa: E402
from scripts.model.processor import load_processor, make_tokenizer  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.rows.jsonl import read_rows  # noqa: E402
from scripts.stage.publish import export_checkpoint, publish_checkpoint  # noqa: E402
from scripts.stage.rundir import Checkpoint  # noqa: E402
from scripts.stage.tables import METRICS, write_metrics  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.ranks import StopAt  # noqa: E402
from tests.stages import Stages, checkpoint, checkpoint_record, logged, weights_hash  # noqa: E402

SFT_STEPS, STEPS, STOP = 60, 4, 2
PAIR = {"prompt": "2 or 3?", "chosen": "3", "rejected": "2"}
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
RANKED = {
    "context": [{"role": "user", "content": "2 or 3?"}],
    "completions": [
        {"rank": 1, "completion": [{"role": "assistant", "content": "2"}]},
        {"rank": 0, "completion": [{"role": "assistant", "content": "3"}]},
    ],
}


def lengths(groups, places=(), told=None):
    """Rewards that differ even where nothing was learnt."""
    return [[float(len(response)) for response in responses] for _, responses in groups]


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The stages, and the checkpoint that all but the first start from; longer responses earn more."""
    made = Stages(tmp_path_factory.mktemp("algorithms"), ROOT / "tests/algorithms.yaml")
    train(made.job("sft", "sft", SFT_STEPS))
    train(made.job("sft", "teacher", STEPS))
    teachers = {
        "math": checkpoint(made.directory / "sft", SFT_STEPS),
        "choice": checkpoint(made.directory / "teacher", STEPS),
    }
    made.parent = {
        "parent_model": teachers["math"],
        "roles": {f"teachers.{name}": folder for name, folder in teachers.items()},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "reward_groups", lengths)
        yield made


ALGORITHMS = ["sft", "dpo", "mpo", "kto", "text", "skipping", "vision", "distillation"]
SOMETIMES = {name: pytest.param(name, marks=pytest.mark.long) for name in ("mpo", "kto", "skipping")}


@pytest.fixture(scope="module", params=[SOMETIMES.get(name, name) for name in ALGORITHMS])
def trained(request, stages):
    """A stage's name and its run directory after an undisturbed training, its learning rate by a cosine."""
    job = stages.job(request.param, f"{request.param}.straight", STEPS, planned=STEPS, **stages.parent)
    train(job)
    return request.param, job.run


def test_a_training_in_parts_or_interrupted_ends_with_the_same_bits(stages, trained):
    name, straight = trained
    job = stages.job(name, f"{name}.parts", STEPS, planned=STEPS, **stages.parent)
    train(replace(job, max_num_steps=1))
    assert [step["step"] for step in logged(job.run)] == [1]
    train(replace(job, max_num_steps=3, stop=StopAt(1, STOP), resume_from=checkpoint(job.run, 1)))
    train(replace(job, max_num_steps=3, resume_from=checkpoint(job.run, STOP)))
    assert [step["step"] for step in logged(job.run)] == [1, STOP, 3]
    train(replace(job, resume_from=checkpoint(job.run, 3)))
    assert weights_hash(job.run, STEPS) == weights_hash(straight, STEPS)
    assert [step["lr"] for step in logged(job.run)] == [step["lr"] for step in logged(straight)]
    assert [step["step"] for step in logged(job.run)] == list(range(1, STEPS + 1))
    tokens = [step["tokens"] for step in logged(job.run)]
    assert tokens == [step["tokens"] for step in logged(straight)] and min(tokens) > 0


def in_micro_batches(job, rows):
    """The job, in which a process takes so many rows at once."""
    policy = job.settings.policy.model_copy(update={"train_micro_batch_size": rows})
    return replace(job, settings=job.settings.model_copy(update={"policy": policy}))


def test_micro_batches_learn_what_whole_batches_learn(stages, trained):
    name, whole = trained
    job = in_micro_batches(stages.job(name, f"{name}.micro", STEPS, planned=STEPS, **stages.parent), 2)
    train(job)
    for micro, straight in zip(logged(job.run), logged(whole), strict=True):
        for key in ("loss", "grad_norm"):
            assert micro[key] == pytest.approx(straight[key], rel=1e-3, abs=1e-6), f"{key} of step {micro['step']}"
        assert micro.get("reward_mean") == straight.get("reward_mean")
    first, second = (load_file(checkpoint(run, STEPS) / "model.safetensors") for run in (job.run, whole))
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first)


@pytest.mark.parametrize("trained", ["sft", "dpo", "text"], indirect=True)
def test_a_stage_that_continues_has_the_moments_of_its_parent_its_own_rate_and_its_first_rows(stages, trained):
    name, parent = trained
    last, rate = STEPS + 3, 5e-4
    job = otherwise(stages.job(name, f"{name}.on", last, **stages.parent), optimizer={"lr": rate})
    job = replace(job, resume_from=checkpoint(parent, STEPS), begun=STEPS)
    assert job.continues
    train(job)
    assert [step["step"] for step in logged(job.run)] == list(range(STEPS + 1, last + 1))
    assert [step["lr"] for step in logged(job.run)] == [rate] * 3
    if name != "text":  # whose tokens are sampled
        assert [step["tokens"] for step in logged(job.run)] == [step["tokens"] for step in logged(parent)[:3]]
    moments = torch.load(checkpoint(job.run, last) / "optimizer.pt", weights_only=True)["state"]
    assert {int(state["step"]) for state in moments.values()} == {last * job.config.updates_per_step}
    parts = replace(job, run=job.run.with_name(f"{name}.on.parts"), max_num_steps=STEPS + 1)
    (parts.run / "checkpoints").mkdir(parents=True)
    train(parts)
    train(replace(parts, max_num_steps=last, resume_from=checkpoint(parts.run, STEPS + 1)))
    assert weights_hash(parts.run, last) == weights_hash(job.run, last)
    assert weights_hash(job.run, last) != weights_hash(parent, STEPS)


@pytest.mark.parametrize("trained", ["sft", "text"], indirect=True)
def test_an_amended_training_goes_on_with_its_own_rate_and_end_on_the_rows_that_come_next(stages, trained):
    name, straight = trained
    begun = stages.job(name, f"{name}.begun", STEPS, planned=STEPS, **stages.parent)
    train(replace(begun, max_num_steps=STOP))
    rate, last = 5e-4, STEPS + 1
    amended = stages.job(name, f"{name}.amended", last, **stages.parent)
    optimizer = {"lr": rate, "weight_decay": 0.1, "adam_beta2": 0.9}
    amended = replace(otherwise(amended, optimizer=optimizer), is_amended=True)
    train(replace(amended, max_num_steps=STOP + 1, resume_from=checkpoint(begun.run, STOP)))
    train(replace(amended, resume_from=checkpoint(amended.run, STOP + 1)))
    steps, unamended = logged(amended.run), logged(straight)
    assert [step["step"] for step in steps] == [*range(STOP + 1, last + 1)]
    assert [step["lr"] for step in steps] == [rate] * len(steps)
    # The first step has the weights, rows and samples of an unamended one; its updates are others.
    same = ("tokens", "reward_mean", "response_length_mean") if name == "text" else ("tokens", "loss")
    assert [steps[0][key] for key in same] == [unamended[STOP][key] for key in same]
    assert steps[1]["loss"] != unamended[STOP + 1]["loss"]
    state = torch.load(checkpoint(amended.run, last) / "optimizer.pt", weights_only=True)
    assert {int(moments["step"]) for moments in state["state"].values()} == {last * amended.config.updates_per_step}
    assert {group["betas"] for group in state["param_groups"]} == {(0.9, 0.9)}
    assert max(group["weight_decay"] for group in state["param_groups"]) == 0.1


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_an_optimizer_reaches_the_trainer_by_its_name(stages, name):
    job = otherwise(stages.job("sft", f"sft.{name}", STEPS), optimizer={"name": name})
    arguments = SFTConfig(**shared_arguments(replace(job, report_to=("tensorboard",))))
    assert arguments.optim == name and arguments.report_to == ["tensorboard"]


def test_another_optimizer_than_the_fused_one_and_another_attention_learn_the_same_but_for_rounding(stages):
    fused = stages.job("sft", "sft.fused", STEPS, **stages.parent)
    other = stages.job("sft", "sft.other", STEPS, **stages.parent)
    other = otherwise(other, optimizer={"name": "adamw_torch"}, attn_implementation="eager")
    for job in (fused, other):
        train(job)
    losses, others = ([step["loss"] for step in logged(job.run)] for job in (fused, other))
    assert losses == pytest.approx(others, rel=1e-3)
    saved = torch.load(checkpoint(fused.run, STEPS) / "optimizer.pt", weights_only=True)
    assert all(group["fused"] for group in saved["param_groups"])


def otherwise(job, optimizer=None, **policy):
    """The job with other settings of its policy."""
    values = job.config.values()
    values["policy"] |= policy | {"optimizer": values["policy"]["optimizer"] | (optimizer or {})}
    return replace(job, config=training_config(values))


def test_a_checkpoint_does_not_grow_with_the_steps_before_it(trained):
    _, straight = trained
    state = json.loads((checkpoint(straight, STEPS) / "trainer_state.json").read_text())
    assert state["global_step"] >= STEPS and state["log_history"] == []


def test_every_weight_that_the_stage_uses_is_trained(stages, trained):
    name, straight = trained
    before, after = (
        load_file(path / "model.safetensors") for path in (stages.parent["parent_model"], checkpoint(straight, STEPS))
    )
    still = {key for key in before if torch.equal(before[key], after[key]) and "post_layernorm" not in key}
    assert all("vision_tower" in key or "projector" in key for key in still)
    assert bool(still) == (name not in ("sft", "vision", "distillation"))


def test_the_log_has_the_same_columns_whatever_the_algorithm(trained, tmp_path):
    name, straight = trained
    for entry in logged(straight):
        assert set(entry) <= set(METRICS.names)
        rewarded = name in ("text", "skipping", "vision")
        assert ("reward_mean" in entry) == bool(entry["environment_rewards"]) == rewarded
        assert {"loss", "grad_norm", "lr", "entropy", "seconds"} <= set(entry)
        assert (entry["timing"] is not None) == (rewarded or bool(entry["divergences"]))
        if entry["timing"]:
            assert set(entry["timing"]) == {"generation", "rewards", "update"}
            assert all((seconds > 0) == (rewarded or phase != "rewards") for phase, seconds in entry["timing"].items())
            assert sum(entry["timing"].values()) == pytest.approx(entry["seconds"])
            rewarding = 1 - entry["generating_share"] - entry["training_share"]
            assert rewarding > 0 if rewarded else rewarding == pytest.approx(0)
            assert min(entry["generating_share"], entry["training_share"]) > 0
    write_metrics(straight / "metrics.jsonl", tmp_path / "metrics.parquet", STEPS)


def test_an_export_sees_without_the_run_directory(stages, trained, tmp_path):
    name, straight = trained
    sealed = Checkpoint(STEPS, checkpoint(straight, STEPS))
    publish_checkpoint(sealed, tmp_path / "ckpt", checkpoint_record(name, sealed.step))
    export_checkpoint(tmp_path / "ckpt", tmp_path / "hf")
    model, processor = (load(tmp_path / "hf/model") for load in (load_model, load_processor))
    rows = [row for blend in ("text", "vision") for _, _, row in read_rows(stages.split(blend))][::7]
    first, second = (
        list(rollouts(model, processor, rows, max_new_tokens=6, temperature=0.0, seed=0)) for _ in range(2)
    )
    assert sorted(place for batch in first for place in batch) == [*range(len(rows))] and first == second


def test_preferences_start_at_the_parent(stages, trained):
    """The first step's loss is that of equal log-ratios, which pins the weights of the mixed losses too."""
    name, straight = trained
    if name == "kto":
        rows = [row for _, _, row in read_rows(stages.split("answers"))][:8]
        weights = sum(0.5 * (1.0 if row["label"] else 1.5) for row in rows)
        assert logged(straight)[0]["loss"] == pytest.approx(weights / 8, abs=1e-3)
    if name == "dpo":
        assert logged(straight)[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    if name == "mpo":
        without_sft = 0.8 * 0.6931 + 0.2 * 2 * 0.6931
        assert logged(straight)[0]["loss"] > without_sft


# --- what is handed to TRL ---


def nemo_rl_advantages(rewards: list[float], normalize: bool) -> list[float]:
    """NeMo-RL's leave-one-out advantages of one group, written with plain lists."""
    advantages = []
    for place, reward in enumerate(rewards):
        others = rewards[:place] + rewards[place + 1 :]
        deviation = statistics.stdev(others) if normalize else 0.0
        difference = reward - statistics.fmean(others)
        advantages.append(difference / (deviation + 1e-6) if deviation > 0 else difference)
    return advantages


@pytest.mark.parametrize("normalize", [True, False])
def test_the_leave_one_out_baseline_is_nemo_rls_centred_or_not(normalize):
    rng = random.Random(0)
    groups = [[rng.random() * 5 for _ in range(4)] for _ in range(3)] + [[1, 0, 0, 0], [2, 2, 2, 2]]
    rewards = torch.tensor(groups, dtype=torch.float32)
    expected = [
        advantage
        for group in groups
        for advantage in nemo_rl_advantages([float(reward) for reward in group], normalize)
    ]
    for given in (rewards, rewards - rewards.mean(1, keepdim=True)):
        assert leave_one_out(given.flatten(), 4, normalize).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_losses_without_a_weight_are_not_computed():
    assert losses(Dpo(max_num_steps=1)) == (["sigmoid"], [1.0])
    assert losses(Dpo(max_num_steps=1, preference_average_log_probs=True)) == (["sigmoid_norm"], [1.0])
    assert losses(Mpo(max_num_steps=1)) == (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0])
    assert losses(Mpo(max_num_steps=1, loss_type="bco_pair")) == (["bco_pair", "bco_pair", "sft"], [0.8, 0.2, 1.0])


FIRST = {"hinge": 1.0, "ipo": 100.0, "robust": 0.6931, "bco_pair": 1.3863, "sppo_hard": 200.0, "apo_zero": 1.0}
FIRST |= {"nca_pair": 1.3863, "apo_down": 1.0, "discopop": 0.8466, "aot": 0.6931, "aot_unpaired": 0.6931}
FIRST |= {"exo_pair": 0.5108}


@pytest.mark.parametrize("name", FIRST)
def test_every_preference_loss_is_trls_by_its_name(stages, name):
    """The first step's loss, where policy and reference are equal, by each paper's formula at beta 0.05."""
    job = stages.job("dpo", f"dpo.{name}", 2, **stages.parent)
    smoothing = {"label_smoothing": 0.1} if name in ("robust", "exo_pair") else {}
    values = job.config.values()
    values["dpo"] |= {"loss_type": name} | smoothing
    train(replace(job, config=training_config(values)))
    first, second = (step["loss"] for step in logged(job.run))
    assert first == pytest.approx(FIRST[name], rel=1e-3) and second != first


def test_a_loss_that_sorts_pairs_wants_them_at_once(stages):
    job = in_micro_batches(stages.job("dpo", "dpo.sorted", 1, **stages.parent), 4)
    values = job.config.values()
    values["dpo"]["loss_type"] = "aot"
    with pytest.raises(UserError, match="loss_type aot sorts the pairs that a process takes at once"):
        train(replace(job, config=training_config(values)))


def test_answers_of_other_rows_come_from_the_same_step():
    rows = Dataset.from_dict({"completion_ids": [[place] for place in range(7)]})
    assert [others for (others,) in with_others(rows, 3)["KL_completion_ids"]] == [2, 0, 1, 5, 3, 4, 6]


def test_kto_wants_two_rows_at_once(stages):
    job = in_micro_batches(stages.job("kto", "kto.single", 1, **stages.parent), 1)
    with pytest.raises(UserError, match="KTO takes 2 rows a process at once or more"):
        train(job)


def test_every_form_of_a_preference_becomes_the_same_tokens():
    tokenizer = make_tokenizer()
    asks, *answers = ([{"role": role, "content": PAIR[name]}] for name, role in ROLES.items())
    lists = dict(zip(ROLES, (asks, *answers), strict=True))
    whole = {name: asks + answer for name, answer in zip(("chosen", "rejected"), answers, strict=True)}
    rows = PAIR, RANKED, lists, whole
    lines = [Line(number, f"rows.jsonl:{number}", json.dumps(row), row) for number, row in enumerate(rows, 1)]
    first, *others = tokenize_answers(lines, tokenizer, max_length=64, variables={})
    assert others == [first] * 3 and not first.pop("is_cut")
    assert {key: tokenizer.decode(ids) for key, ids in first.items()} == {
        "prompt_ids": "<|user|>2 or 3?<|end|><|assistant|>",
        "chosen_ids": "3<|end|>",
        "rejected_ids": "2<|end|>",
    }


def test_a_pair_that_is_too_long_may_lose_the_end_of_its_answers():
    tokenizer, row = make_tokenizer(), PAIR | {"chosen": "3" * 90}
    prompt = tokenize_answers([Line(1, "rows.jsonl:1", "", PAIR)], tokenizer, max_length=64, variables={})[0][
        "prompt_ids"
    ]
    for longest in (64, len(prompt)):
        (pair,) = tokenize_answers(
            [Line(1, "rows.jsonl:1", "", row)], tokenizer, max_length=longest, variables={}, cuts=True
        )
        assert len(pair["prompt_ids"]) + len(pair["chosen_ids"]) == longest and pair["rejected_ids"]
        assert pair["prompt_ids"] == prompt[-len(pair["prompt_ids"]) :]


def split_of(folder, rows):
    """A training split of these rows, beside its manifest."""
    split = folder / "rows.jsonl"
    split.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {"rows": len(rows), "sha256": sha256_file(split)}
    write_json(folder / "manifest.json", {"train": described, "validation": described})
    return split


def test_a_pair_that_is_too_long_is_named(stages, tmp_path):
    job = stages.job("dpo", "dpo.long", STEPS, **stages.parent)
    rows = split_of(tmp_path, [PAIR, PAIR | {"chosen": "3" * 90}])
    with pytest.raises(UserError, match=r"rows.jsonl:2: prompt and answer have \d+ tokens, more than the 64"):
        train(replace(job, train_split=rows))


def test_pictures_that_cannot_be_learnt_from_are_refused(stages, tmp_path):
    (_, _, seen), (_, _, text) = (next(read_rows(stages.split(blend))) for blend in ("vision", "text"))
    rows = split_of(tmp_path, [seen, text])
    job = stages.job("vision", "vision.mixed", STEPS, **stages.parent)
    with pytest.raises(UserError, match=r"rows.jsonl:2: shows no picture, but other rows do, which TRL cannot mix"):
        train(replace(job, train_split=rows))
    blind = stages.job("sft", "sft.blind", STEPS)
    blind = replace(
        blind, config=blind.config.model_copy(update={"model": blind.config.model.model_copy(update={"vision": None})})
    )
    with pytest.raises(
        UserError, match=r"train-split.jsonl:\d+: shows a picture, but the recipe's model has no vision"
    ):
        train(blind)


def test_a_model_that_sees_gets_no_head_for_rewards(stages):
    job = stages.job("dpo", "dpo.head", 1, **stages.parent)
    with pytest.raises(UserError, match=r"dpo: .* sees pictures, and no such model has a head for rewards"):
        make_reward_trainer(job)


def test_nodes_that_cannot_share_a_step_are_refused(stages):
    for stage in ("dpo", "text"):
        job = stages.job(stage, f"{stage}.nodes", STEPS)
        check_shares(stage, job.config, job.settings, 4, 4)
    job = stages.job("dpo", "dpo.nodes", STEPS)
    with pytest.raises(UserError, match=r"train_global_batch_size is 8, which 3 nodes cannot share"):
        check_shares("dpo", job.config, job.settings, 3, 3)
    small = in_micro_batches(job, 3).settings
    with pytest.raises(UserError, match=r"train_micro_batch_size is 3, but 4 rows of an update fall to each of 2 proc"):
        check_shares("dpo", job.config, small, 1, 2)
