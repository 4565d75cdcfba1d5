"""A model whose template begins every answer with <think> trains and is scored by the answers behind its thoughts."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from scripts.backends.trl.tokenization import lines_of, preparation_of  # noqa: E402
from scripts.backends.trl.train import train_rank  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.evaluate.score import answer_rows  # noqa: E402
from scripts.model.loading import load_model  # noqa: E402
from scripts.model.processor import load_processor, use_template  # noqa: E402
from scripts.rewards.answers import UnfinishedThoughts  # noqa: E402
from scripts.rows.chat_format import SHIPPED  # noqa: E402
from tests.pretrained import save_pretrained  # noqa: E402
from tests.stages import Stages, logged  # noqa: E402

TEMPLATE = (SHIPPED / "deepseek_r1_distill.jinja").read_text().replace("<｜end▁of▁sentence｜>", "<|im_end|>")


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return Stages(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r1")
    save_pretrained("llama", folder, chat_template=TEMPLATE, bos_token="<|reserved|>")
    return folder


def test_grpo_starts_and_counts_the_thoughts_that_do_not_end(stages, model):
    job = stages.job("rlvr1", "thinking", 1)
    policy = job.config.policy.model_copy(update={"max_total_sequence_length": 256})
    job = replace(job, parent_model=model, config=job.config.model_copy(update={"policy": policy}))
    train_rank(job)
    (step,) = logged(job.run)
    assert step["unfinished_thoughts_share"] == 1, "random weights end no thoughts"
    assert step["reward_mean"] == 0 and step["unjudged_share"] == 0
    decoding = {"max_new_tokens": 4, "temperature": 0.0, "seed": 0}
    answers = answer_rows(load_model(model), load_processor(model), [job.train_split], decoding)
    assert all(isinstance(answer.reward, UnfinishedThoughts) for answer in answers)
    assert all(answer.response.startswith("<think>\n") and answer.tokens <= 4 for answer in answers)
    plain = answer_rows(load_model(model), load_processor(model), [job.train_split], decoding, told="none")
    assert not any(isinstance(answer.reward, UnfinishedThoughts) for answer in plain)
    assert [f"<think>\n{answer.response}" for answer in plain] == [answer.response for answer in answers]


def test_sft_is_refused_by_the_rows_that_do_not_fit_and_not_by_the_model(stages, model):
    job = replace(stages.job("sft", "thinking sft", 1), parent_model=model)
    with pytest.raises(UserError, match=r"train-split.jsonl:1: .* the prompt begins thoughts, and this row has none"):
        train_rank(job)
    lines = [json.loads(line) for line in job.train_split.read_text().splitlines()]
    for row in lines:
        row["messages"][-1]["content"] = f"<think>\nLet me see.\n</think>\n\n{row['messages'][-1]['content']}"
    job.train_split.write_text("".join(json.dumps(row) + "\n" for row in lines))
    training = (
        (SHIPPED / "deepseek_r1_distill_training.jinja").read_text().replace("<｜end▁of▁sentence｜>", "<|im_end|>")
    )
    processor = use_template(load_processor(model), training)
    _, prepare = preparation_of(job.config, processor)
    (row, *_) = prepare(list(lines_of(job.train_split)), max_length=999)
    learnt = processor.decode([label for label in row["labels"] if label >= 0])
    assert learnt.startswith("Let me see.\n</think>\n\n") and learnt.endswith("<|im_end|>")
