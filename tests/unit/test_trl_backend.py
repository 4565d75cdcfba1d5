"""What the TRL backend adds to TRL's trainers."""

import json
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from scripts.recipe.model import RandomModel
from tests.stages import Stages

# TRL is imported by the tests that use it: the other process of pytest-xdist, which collects them too, need not wait.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="envs/trl.txt is not installed")

SHAPE = RandomModel(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    rope_theta=100.0,
)


@pytest.mark.slow
def test_each_prompts_completions_are_rewarded_together_even_when_two_prompts_are_alike():
    from scripts.backends.trl.measuring import environment_reward

    greeting = json.dumps({"agent_ref": {"name": "genrm_simple_agent"}, "reference": "Hi Bob"})
    sum_ = json.dumps({"agent_ref": {"name": "math_with_judge_simple_agent"}, "question": "", "expected_answer": "2"})
    logged = defaultdict(list)
    rewards = environment_reward(2)(
        completions=["Hi Bob", "zz", "Hi Bob", "Hi Bob", r"\boxed{2}", "3"],
        row=[greeting] * 4 + [sum_] * 2,
        log_metric=lambda name, value: logged[name].append(value),
    )
    assert rewards[0] > rewards[1] and rewards[2] == rewards[3] == 5.0 and rewards[4:] == [1.0, 0.0]
    assert logged["environment/math_with_judge_simple_agent"] == [0.5]
    assert sum(logged["environment/genrm_simple_agent"]) / 2 == pytest.approx(sum(rewards[:4]) / 4)


def test_responses_that_cannot_be_judged_are_counted_and_the_first_is_warned_of(capsys):
    from scripts.backends.trl.measuring import environment_reward

    row = {"agent_ref": {"name": "structured_outputs_simple_agent"}, "schema_type": "json"}
    row["schema_str"] = json.dumps({"properties": {"a": {"multipleOf": 0.5}}})
    reward, logged = environment_reward(2, split=Path("train-split.jsonl")), []

    def step(bad: int) -> None:
        answers = ['{"a": 2}'] * (200 - bad) + ['{"a": Infinity}'] * bad
        log = dict.fromkeys(("rewards/unjudged",))
        rewards = reward(
            completions=answers, row=[json.dumps(row)] * 200, line=list(range(1, 201)), log_metric=log.__setitem__
        )
        assert rewards == [1.0] * (200 - bad) + [0.0] * bad
        logged.append(log["rewards/unjudged"])

    for bad in (0, 1, 1, 2, 0, 20):
        step(bad)
    assert logged == [0.0, 0.005, 0.005, 0.01, 0.0, 0.1]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: 1 of the step's 200 responses could not be judged and earn 0, the first, to ")
    assert "train-split.jsonl:200: OverflowError: " in warning


@pytest.mark.parametrize(("steps", "seconds", "lines"), [(100, 0.1, 21), (7, 0.1, 7), (400, 3.0, 61)])
def test_progress_is_said_in_about_twenty_lines_and_at_least_every_20_seconds(
    tmp_path, monkeypatch, capsys, steps, seconds, lines
):
    from transformers import TrainerControl, TrainerState

    from scripts.backends.trl import train

    now = 0.0
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: now))
    callback = train.StageCallback(Stages(tmp_path).job("sft", "run", steps))
    for step in range(1, steps + 1):
        now += seconds
        callback.on_log(None, TrainerState(global_step=step), TrainerControl(), {"loss": 1.0})
    said = [int(line.partition("/")[0].rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert (said[0], said[-1], len(said)) == (1, steps, lines)
    assert max(later - step for step, later in pairwise(said)) * seconds < 20 + seconds


def test_only_the_assistants_tokens_are_learnt():
    from scripts.backends.trl.tokenization import Line, tokenize_demonstrations
    from scripts.model.processor import make_tokenizer

    tokenizer = make_tokenizer()
    row = {"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ok"}]}
    line = Line(1, "split.jsonl:1", json.dumps(row), row)
    (tokenized,) = tokenize_demonstrations([line], tokenizer, max_length=64, variables={})
    assert tokenizer.decode(tokenized["input_ids"]) == "<|user|>hé<|end|><|assistant|>ok<|end|>"
    learnt = [token for token in tokenized["labels"] if token != -100]
    assert tokenizer.decode(learnt) == "ok<|end|>"
    (cut,) = tokenize_demonstrations([line], tokenizer, max_length=3, variables={})
    assert len(cut["input_ids"]) == len(cut["labels"]) == 3


def test_the_last_batch_of_an_epoch_is_filled_with_rows_of_which_nothing_is_learnt():
    from datasets import Dataset

    from scripts.backends.trl.offline_trainers import fill_last_batch
    from scripts.backends.trl.tokenization import DEMONSTRATIONS

    rows = [{"input_ids": [number, 7], "labels": [-100, 7], "pictures": []} for number in range(6)]
    made = Dataset(pa.Table.from_pylist(rows, schema=DEMONSTRATIONS))
    filled = list(fill_last_batch(made, 4))
    assert filled[:6] == rows and filled[6:] == [{"input_ids": [0], "labels": [-100], "pictures": []}] * 2
    assert fill_last_batch(made, 3) is made


def test_the_tokenizer_has_a_token_a_byte_and_gives_every_text_back():
    from scripts.model.processor import make_tokenizer

    tokenizer = make_tokenizer()
    text = "".join(map(chr, range(1, 400))) + "日本 🎉"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_equal_configs_give_equal_models_and_another_seed_another():
    import torch

    from scripts.model.loading import make_model
    from scripts.model.processor import make_tokenizer

    def weights(seed: int):
        model = make_model(SHAPE, make_tokenizer(), max_length=64, seed=seed)
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("kind", ["constant_with_warmup", "cosine"])
def test_the_rate_rises_from_the_first_step_of_a_warm_up_and_is_as_before_after_it(tmp_path, kind):
    import torch
    from transformers import Trainer, TrainingArguments

    from scripts.backends.trl.setup import warm_up_from_first_step

    def rates(first: float | None) -> list[float]:
        options = {"learning_rate": 8.0, "warmup_steps": 4, "lr_scheduler_type": kind, "report_to": "none"}
        trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, **options))
        optimizer = SimpleNamespace(lr=8.0, lr_warmup_iters=2, lr_warmup_init=first)
        config = SimpleNamespace(policy=SimpleNamespace(optimizer=optimizer), updates_per_step=2)
        warm_up_from_first_step(trainer, SimpleNamespace(config=config))
        trainer.create_optimizer_and_scheduler(8)
        found = []
        for _ in range(8):
            found.append(trainer.optimizer.param_groups[0]["lr"])
            assert trainer.lr_scheduler.get_last_lr()[0] == found[-1]
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
        return found

    before, after = rates(None), rates(4.0)
    assert before[:4] == [0, 2, 4, 6] and after[:4] == [4, 5, 6, 7]
    assert after[4:] == before[4:]
