"""A policy learns to call a tool over several turns; held-out scores roll out as the trainer does; a resume loses nothing."""

import json
import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from trl.chat_template_utils import parse_response, qwen3_chat_template

from scripts.backends.trl.measuring import MeasuringTrainer
from scripts.backends.trl.train import train_rank
from scripts.data.fill import fill_blend
from scripts.errors import UserError
from scripts.evaluate.score import answer_rows, rollouts
from scripts.evaluate.turns import EpisodeRunner, prepare_for_tools
from scripts.files import sha256_file, write_json
from scripts.model.generate import Sampler
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments, resolve_stage, training_config
from scripts.recipe.stage_settings import Checkpointing
from scripts.rewards.episode import whole_text
from scripts.rewards.registry import SPECS, register
from scripts.rows.jsonl import read_rows
from tests.conftest import ROOT
from tests.pretrained import tokenizer as pretrained_tokenizer
from tests.stages import Stages, checkpoint, logged

EXAMPLE = ROOT / "config/environments/calculator.py"
DICE = """
import random


class Dice:
    def reset(self, **row):
        self.thrown = random.randrange(10, 100)
        return f"+{self.thrown}"

    def calculate(self, expression: str) -> str:
        '''Work it out.

        Args:
            expression: A product.
        '''
        return str(self.thrown)


def verify(row, response):
    return len(set(response)) / 10 % 1
"""


class Chain(Stages):
    """The recipe tiny-tools below a folder, with the rows that the example's program writes."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder
        self.recipe = load_recipe(ROOT / "config/recipes/tiny-tools.yaml")
        spec = spec_from_file_location("calculator_rows", ROOT / "config/environments/calculator_rows.py")
        program = module_from_spec(spec)
        spec.loader.exec_module(program)
        program.write_rows(folder)
        for name, blend in self.recipe.blends.items():
            is_rewarded = blend.kind == "prompts"
            filled = fill_blend(
                folder / f"{name}.jsonl", folder / "tables", folder / name, blend.holdout, is_rewarded=is_rewarded
            )
            write_json(folder / name / "manifest.json", filled)
        register(own_environments(self.recipe))

    def train(self, stage: str, run: str, parent: Path | None, steps: int, settings=None, **options) -> Path:
        """Train some steps of a stage; its last checkpoint."""
        values = resolve_stage(self.recipe, stage).values()
        for section, changed in (settings or {}).items():
            values[section] |= changed
        told = {"config": training_config(values), "parent_model": parent}
        told |= {"environments": own_environments(self.recipe, stage)} | options
        train_rank(self.job(stage, run, steps, settings={"checkpointing": Checkpointing(save_period=2)}, **told))
        return checkpoint(self.directory / run, steps)

    def held_out(self, export: Path) -> list:
        """A policy's answers to the held-out rows, as the recipe's evaluation decodes them."""
        evaluation = self.recipe.evaluation
        split = self.directory / "products/val-split.jsonl"
        return answer_rows(load_model(export), load_processor(export), [split], evaluation.decoding)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    known = dict(SPECS)
    yield Chain(tmp_path_factory.mktemp("tools"))
    SPECS.clear()
    SPECS.update(known)


@pytest.fixture(scope="module")
def demonstrated(chain):
    """What SFT has made of the fresh model."""
    return chain.train("sft", "sft", None, chain.recipe.stages["sft"].section.max_num_steps)


@pytest.fixture
def small(chain):
    """Settings of a stage of a few rollouts."""
    grpo = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}
    return {"grpo": resolve_stage(chain.recipe, "rlvr").values()["grpo"] | grpo}


@pytest.fixture(scope="module")
def taught(chain, demonstrated):
    """What GRPO has made of that."""
    return chain.train("rlvr", "rlvr", demonstrated, chain.recipe.stages["rlvr"].section.max_num_steps)


def test_the_example_learns_to_call_its_tool_and_the_held_out_score_rises(chain, demonstrated, taught):
    before, after = chain.held_out(demonstrated), chain.held_out(taught)
    assert sum(answer.reward for answer in before) < len(before) / 4
    assert sum(answer.reward for answer in after) > len(after) * 3 / 4
    assert before[0].response == "too hard"
    answer = next(answer for answer in after if answer.reward == 1)
    product = math.prod(map(int, answer.prompt.split("*")))
    assert answer.response == f'calculate(expression="{answer.prompt}")\n-> {product}\n{product}'
    steps = logged(chain.directory / "rlvr")
    assert steps[-1]["tool_call_frequency"] > 1.5 * steps[0]["tool_call_frequency"] > 0
    assert all(0 <= step["tool_failure_frequency"] <= 1 for step in steps)


def test_trainer_and_evaluation_play_the_same_turns_and_no_result_of_a_tool_is_learnt(
    chain, taught, small, monkeypatch
):
    seen, generate = [], MeasuringTrainer._generate
    monkeypatch.setattr(
        MeasuringTrainer, "_generate", lambda trainer, prompts: seen.append(generate(trainer, prompts)) or seen[-1]
    )
    policy = resolve_stage(chain.recipe, "rlvr").values()["policy"]
    policy["generation"]["top_k"] = 1
    chain.train("rlvr", "greedy", taught, 1, small | {"policy": policy})
    ((_, response_ids, masks, conversations, *_),) = seen
    rows = [row for _, _, row in read_rows(chain.split("products"))][:4]
    model, tokenizer = load_model(taught), load_processor(taught)
    (found,) = rollouts(model, tokenizer, rows, 80, temperature=0.0, seed=0, max_tool_calling_iterations=2)
    assert [found[place].text.messages for place in range(4)] == conversations[::4]
    results = 0
    for ids, mask, messages in zip(response_ids, masks, conversations, strict=True):
        masked = tokenizer.decode([token for token, is_learnt in zip(ids, mask, strict=True) if not is_learnt])
        told = [message["content"] for message in messages if message["role"] == "tool"]
        assert masked == "".join(f"<|tool|>{result}<|end|><|assistant|>" for result in told)
        results += len(told)
    assert results > len(masks) / 2


def test_a_training_resumed_between_throws_of_dice_ends_with_the_same_bits(chain, demonstrated, small, tmp_path):
    dice = tmp_path / "dice.py"
    dice.write_text(DICE)
    own = {"environments": {"calculator": sha256_file(dice)}}
    named = {"environments": {"calculator": dice}}
    whole = chain.train("rlvr", "whole", demonstrated, 4, small | own, **named)
    half = chain.train("rlvr", "half", demonstrated, 2, small | own, **named)
    resumed = chain.train("rlvr", "half", demonstrated, 4, small | own, resume_from=half, **named)
    rewards = [[step["reward_mean"] for step in logged(chain.directory / run)] for run in ("whole", "half")]
    assert rewards[0] == rewards[1] and len(set(rewards[0])) > 1
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    register(own_environments(chain.recipe))


def test_rows_without_tools_stand_beside_and_those_that_declare_their_own_are_refused(chain, demonstrated, small):
    split = chain.split("products")
    text = split.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    larger = {
        "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        "responses_create_params": {"input": "math: larger of 12 and 34?"},
        "question": "",
        "expected_answer": "34",
    }
    declares = json.loads(json.dumps(larger))
    declares["responses_create_params"]["tools"] = [{"type": "function", "name": "ring", "parameters": {}}]
    try:
        for beside, run in ((larger, "beside"), (declares, "declares")):
            split.write_text("".join(json.dumps(row) + "\n" for row in (beside, *rows[1:])))
            manifest = split.with_name("manifest.json")
            record = json.loads(manifest.read_text())
            record["train"]["sha256"] = sha256_file(split)
            write_json(manifest, record)
            if run == "declares":
                with pytest.raises(UserError, match=r"train-split.jsonl:1: declares tools, but TRL"):
                    chain.train("rlvr", run, demonstrated, 1, small)
                continue
            chain.train("rlvr", run, demonstrated, 1, small)
            (step,) = logged(chain.directory / run)
            assert set(step["environment_rewards"]) == {"calculator", "math_with_judge_simple_agent"}
    finally:
        split.write_text(text)


def test_turns_are_played_by_qwen3s_template_too_and_a_template_without_tools_is_refused(chain, monkeypatch):
    tokenizer = pretrained_tokenizer(chat_template=qwen3_chat_template)
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call><|im_end|>'
    said = iter([[call % "6*7", "Too hard.<|im_end|>", call % "six"], ["42<|im_end|>", call % "7*7"], ["49<|im_end|>"]])
    prompts = []

    def sample(runner: EpisodeRunner, prompt_ids: list[list[int]], *_, **__):
        prompts.append([tokenizer.decode(ids) for ids in prompt_ids])
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in next(said)], None

    monkeypatch.setattr(EpisodeRunner, "_generate_single_turn", sample)
    sampler = Sampler(load_model_shape(), tokenizer, 600, 0.0, 0, chat_template_kwargs={"enable_thinking": False})
    rows = [row for _, _, row in read_rows(chain.split("products"))][:3]
    ((first, second, third),) = (batch.values() for batch in EpisodeRunner(sampler).respond(rows))
    assert whole_text(first.text) == 'calculate(expression="6*7")\n-> 42\n42' and first.text == "42"
    assert whole_text(second.text) == "Too hard."
    assert "'six' is not two whole numbers" in whole_text(third.text) and third.text == "49"
    assert '"name": "calculate"' in prompts[0][0] and "whole numbers" in prompts[0][0]
    assert prompts[1][0].startswith(prompts[0][0] + call % "6*7") and "<tool_response>\n42" in prompts[1][0]
    endless = "<tool_call>" + "[" * 5000
    parsed = parse_response(tokenizer, tokenizer(endless)["input_ids"], prefix=[])
    assert parsed == {"role": "assistant", "content": endless}
    with pytest.raises(UserError, match="chat template omits calls or results of tools"):
        prepare_for_tools(pretrained_tokenizer())


def load_model_shape():
    """As much of a model as turns without sampling read."""
    config = type("Config", (), {"max_position_embeddings": 4096})
    generation = type("Generation", (), {"eos_token_id": None})
    shape = {"config": config, "generation_config": generation, "eval": staticmethod(list)}
    shape |= {"device": torch.device("cpu"), "get_output_embeddings": lambda: torch.nn.Linear(1, 1)}
    return type("Model", (), shape)
