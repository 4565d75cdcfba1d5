"""policy.skip_padding: the same losses and the same distribution of responses as without."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

torch = pytest.importorskip("torch")

from transformers import LlamaConfig, LlamaForCausalLM, set_seed  # noqa: E402

from scripts.backends.trl import measuring, skipping  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.stages import Stages, checkpoint, logged  # noqa: E402

VOCABULARY, END, PAD, ROWS = 6, 0, 5, 20000
STEPS = 3


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The stages of every algorithm, and the checkpoint from which all but the first start."""
    made = Stages(tmp_path_factory.mktemp("skipping"), ROOT / "tests/algorithms.yaml")
    train(made.job("sft", "sft", STEPS))
    start = checkpoint(made.directory / "sft", STEPS)
    train(made.job("sft", "teacher", 1))
    teachers = {"teachers.math": start, "teachers.choice": checkpoint(made.directory / "teacher", 1)}
    made.parent = {"parent_model": start, "roles": teachers}
    return made


@pytest.mark.parametrize("name", ["sft", "dpo", "mpo", "text", "skipping", "vision", "distillation"])
def test_without_padding_the_same_rollouts_have_the_same_losses_but_for_rounding(stages, name, monkeypatch):
    monkeypatch.setattr(
        measuring, "reward_groups", lambda groups, *_, **__: [list(map(len, texts)) for _, texts in groups]
    )
    if name not in ("vision", "distillation"):  # whose prompts transformers samples
        monkeypatch.setattr(skipping, "sample", lambda model, *given, **options: model._sample(*given, **options))
    found = []
    for skips in (False, True):
        job = stages.job(name, f"{name}.{skips}", STEPS, **stages.parent)
        values = job.config.values()
        train(replace(job, config=training_config(values | {"policy": values["policy"] | {"skip_padding": skips}})))
        found.append(logged(job.run))
    for plain, skipped in zip(*found, strict=True):
        assert plain.get("response_length_mean") == skipped.get("response_length_mean")
        for key in ("loss", "grad_norm"):
            assert skipped[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), f"{key} of step {plain['step']}"


@pytest.fixture(scope="module")
def model():
    """A model with few tokens, and random weights large enough to like some better."""
    set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": END, "pad_token_id": PAD}
    return LlamaForCausalLM(LlamaConfig(**shape, **tokens, initializer_range=0.7)).eval()


def batch(*prompts):
    """Prompts, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@pytest.mark.parametrize("lengths", [(1, 2, 2, 3, 5, 6, 7), (4,) * 7], ids=["padded", "alike"])
def test_greedy_responses_are_transformers_own_whenever_the_other_rows_end(model, lengths):
    set_seed(2)
    prompts = [list(map(int, torch.randint(1, PAD, (length,)))) for length in lengths for _ in range(3)]
    given = batch(*(prompt for prompt in prompts for _ in range(2)))
    plain, skipped = (
        model.generate(**given, do_sample=False, max_new_tokens=12, **options)
        for options in ({}, {"custom_generate": skipping.sample})
    )
    ends = (plain[:, given["input_ids"].shape[1] :] == END).any(1)
    assert 0 < ends.sum() < len(ends)
    assert torch.equal(plain, skipped)


def test_sampled_responses_have_the_models_probabilities(model):
    """Three tokens at most, at a temperature and without the unlikeliest, by Pearson's test at 1e-4."""
    prompts, options = ([2, 3], [4]), {"temperature": 1.3, "top_k": 4, "max_new_tokens": 3}
    set_seed(1)
    given = batch(*(prompt for prompt in prompts for _ in range(ROWS)))
    output = model.generate(**given, do_sample=True, custom_generate=skipping.sample, **options)[:, 2:].tolist()
    for number, prompt in enumerate(prompts):
        rows = [row[: row.index(END) + 1] if END in row else row for row in output[number * ROWS :][:ROWS]]
        seen = Counter(map(tuple, rows))
        expected = {row: ROWS * probability(model, prompt, row) for row in seen}
        assert sum(expected.values()) == pytest.approx(ROWS, rel=0.02)
        common = [row for row in seen if expected[row] > 5]
        statistic = sum((seen[row] - expected[row]) ** 2 / expected[row] for row in common)
        freedom = len(common) - 1
        assert freedom > 20 and statistic < freedom + 4 * (2 * freedom) ** 0.5


@torch.no_grad()
def probability(model, prompt, response):
    """The probability of a response at the temperature, among the four likeliest tokens each time."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 1.3
    kept = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf).softmax(-1)
    return prod(kept[range(len(response)), response].tolist())
