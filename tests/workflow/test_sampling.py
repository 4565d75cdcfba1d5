"""Where responses end, what a stage samples from, and what a batch that does not fit leads to."""

import json
import string
from functools import partial

import pytest

pytest.importorskip("trl")

import torch

from scripts.backends.trl.measuring import MeasuringTrainer
from scripts.backends.trl.rows import training_rows
from scripts.backends.trl.tokenization import PROMPTS, render_prompts
from scripts.backends.trl.train import train_rank
from scripts.errors import UserError
from scripts.evaluate.score import rollouts as batches
from scripts.model.generate import end_tokens
from scripts.model.loading import make_model
from scripts.model.processor import make_tokenizer
from scripts.recipe.resolve import training_config
from scripts.rows.jsonl import read_rows
from tests.stages import Stages


def rollouts(model, processor, rows: list, *asked, **options) -> list:
    """The responses to all rows, in the rows' order."""
    found = {
        place: each for batch in batches(model, processor, rows, *asked, **options) for place, each in batch.items()
    }
    return [found[place] for place in range(len(rows))]


STOPS = sorted({*string.digits, *string.punctuation} - {*"<|>"})  # no part of a special token's name


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return Stages(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def untrained(stages):
    tokenizer = make_tokenizer()
    return make_model(stages.recipe.model, tokenizer, 256, seed=0), tokenizer


def job_with(stages: Stages, run: str, *, overlong_filtering: bool, **generation: object):
    job = stages.job("rlvr1", run, 1)
    values = job.config.values() | {"model": stages.recipe.model.model_dump(mode="json")}
    values["grpo"] |= {
        "overlong_filtering": overlong_filtering,
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 4,
    }
    values["policy"]["generation"] |= generation
    return stages.job("rlvr1", run, 1, config=training_config(values))


def test_what_ends_at_a_token_of_the_stage_is_not_cut_and_is_learnt_from(stages, monkeypatch):
    made, score = [], MeasuringTrainer._generate_and_score_completions
    monkeypatch.setattr(
        MeasuringTrainer,
        "_generate_and_score_completions",
        lambda trainer, inputs: made.append(score(trainer, inputs)) or made[-1],
    )
    tokenizer = make_tokenizer()
    stops = tokenizer.convert_tokens_to_ids(STOPS)
    job = job_with(stages, "ends", overlong_filtering=True, stop_token_ids=stops)
    train_rank(job)
    (output,) = made
    lengths, ended = output["completion_mask"].sum(1).tolist(), 0
    for ids, length in zip(output["completion_ids"].tolist(), lengths, strict=True):
        place = next((place for place, token in enumerate(ids) if token in {*stops, tokenizer.eos_token_id}), None)
        assert length == (0 if place is None else place + 1)
        ended += place is not None
    assert ended > len(lengths) / 2 and output["num_items_in_batch"] == sum(lengths)
    share = 1 - ended / len(lengths)
    logged = json.loads((job.run / "metrics.jsonl").read_text())
    assert logged["truncation_rate"] == pytest.approx(share)


def test_held_out_responses_end_at_tokens_too(stages, untrained):
    model, tokenizer = untrained
    rows = [row for _, _, row in read_rows(stages.split("rlvr1"))][:40]
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 0}
    answers = rollouts(model, tokenizer, rows, **options, stop_token_ids=tokenizer.convert_tokens_to_ids(STOPS))
    assert 0 < sum(answer.is_cut for answer in answers) < len(answers)
    for answer in answers:
        inside = answer.text[:-1] if answer.text.endswith(tuple(STOPS)) else answer.text
        assert answer.is_cut == (inside == answer.text) and not set(inside) & set(STOPS)
        assert answer.tokens == 12 if answer.is_cut else answer.tokens < 12


def test_the_likeliest_token_alone_is_what_greedy_takes(stages, untrained):
    model, tokenizer = untrained
    rows = [row for _, _, row in read_rows(stages.split("rlvr1"))][:8]
    greedy = rollouts(model, tokenizer, rows, 8, 0.0, 0)
    assert rollouts(model, tokenizer, rows, 8, 1.0, 0, top_k=1) == greedy
    assert rollouts(model, tokenizer, rows, 8, 1.0, 0, min_p=0.999) == greedy
    assert rollouts(model, tokenizer, rows, 8, 1.0, 0) != greedy


def test_a_batch_that_no_memory_is_left_for_is_halved(stages, untrained, monkeypatch):
    model, tokenizer = untrained
    rows = [row for _, _, row in read_rows(stages.split("rlvr1"))][:10]
    whole, generate, sizes = rollouts(model, tokenizer, rows, 8, 0.0, 0), model.generate, []

    def small(**batch: object):
        sizes.append(len(batch["input_ids"]))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(**batch)

    monkeypatch.setattr(model, "generate", small)
    assert [answer.text for answer in rollouts(model, tokenizer, rows, 8, 0.0, 0)] == [a.text for a in whole]
    assert sizes == [10, 5, 2, 3, 5, 2, 3]
    monkeypatch.setattr("scripts.model.generate.CACHE_BYTES", 0)
    sizes.clear()
    rollouts(model, tokenizer, rows, 8, 0.0, 0)
    assert sizes == [1] * 10


def test_variables_of_the_chat_template_reach_the_prompt(stages, untrained):
    model, tokenizer = untrained
    row = next(row for _, _, row in read_rows(stages.split("rlvr1")))
    asked = []
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{{ '</think>' if not thinking|default(true) }}"
    try:
        for variables in ({}, {"thinking": False}):
            heard = model.register_forward_pre_hook(
                lambda _, __, inputs: asked.append(inputs["input_ids"][0].tolist()), with_kwargs=True
            )
            rollouts(model, tokenizer, [row], 1, 0.0, 0, chat_template_kwargs=variables)
            heard.remove()
    finally:
        tokenizer.chat_template = template
    assert tokenizer.decode(asked[1]) == tokenizer.decode(asked[0]) + "</think>"
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}


def test_rows_whose_prompt_is_too_long_are_left_out_and_the_next_are_taken(stages):
    def job(run: str, steps: int, longest: int | None):
        values = stages.job("rlvr1", run, steps).config.values()
        values |= {"model": stages.recipe.model.model_dump(mode="json"), "data": {"max_input_seq_length": longest}}
        return stages.job("rlvr1", run, steps, config=training_config(values))

    def rows(job, count: int) -> list[tuple[int, int]]:
        """Line numbers and lengths in tokens."""
        options = {"processor": make_tokenizer(), "max_length": job.config.longest_prompt, "variables": {}}
        prepare = partial(render_prompts, keep_to=job.config.data.max_input_seq_length, **options)
        read = training_rows(job, count, PROMPTS, prepare)
        return list(zip(read["line"], map(len, make_tokenizer()(list(read["prompt"]))["input_ids"]), strict=True))

    every = rows(job("every", 1, None), 1000)
    longest = sorted(length for _, length in every)[len(every) // 2]
    kept = [row for row in every if row[1] <= longest]
    assert len(kept) < len(every) and rows(job("kept", 1, longest), 10) == kept[:10]
    with pytest.raises(UserError, match=r"every row is left out; raise data.max_input_seq_length"):
        rows(job("none", 1, 1), 10)
