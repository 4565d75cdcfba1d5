"""The same row is the same tokens to transformers, to what trains it, to what scores it, and to TRL by itself."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from datasets import Dataset  # noqa: E402
from transformers import GenerationMixin  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from scripts.backends.trl.backend import BACKEND  # noqa: E402
from scripts.backends.trl.tokenization import ANSWERS, Line, tokenize_answers, tokenize_demonstrations  # noqa: E402
from scripts.backends.trl.train import train_rank  # noqa: E402
from scripts.evaluate.score import rollouts  # noqa: E402
from scripts.files import read_json, write_json  # noqa: E402
from scripts.model.loading import load_model  # noqa: E402
from scripts.model.processor import load_processor  # noqa: E402
from scripts.rows.prompts import prompt_of  # noqa: E402
from scripts.stage.publish import take_settings  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.pretrained import save_beginning, save_pretrained  # noqa: E402
from tests.stages import Stages, checkpoint  # noqa: E402
from tests.unit.test_chat_format import MARKED, TALK  # noqa: E402

FAMILIES = ("llama", "gemma3", "qwen3")
PAIR = {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": TALK[3:]}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return Stages(tmp_path_factory.mktemp("templates"))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A model of a family in a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    save_beginning(request.param, folder, MARKED)
    if request.param != "qwen3":
        tokenizer = load_processor(folder)
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return folder


def line(row: dict) -> Line:
    return Line(1, "split.jsonl:1", json.dumps(row), row)


def by_transformers(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("assistant_only", [False, True])
def test_demonstrations_are_to_us_what_they_are_to_trl(model, tmp_path, assistant_only):
    tokenizer = load_processor(model)
    (ours,) = tokenize_demonstrations([line({"messages": TALK})], tokenizer, 999, {}, assistant_only)
    row = {"messages": TALK} if assistant_only else {"prompt": TALK[:-1], "completion": TALK[-1:]}
    arguments = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", assistant_only_loss=assistant_only
    )
    trainer = SFTTrainer(str(model), args=arguments, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
    theirs = trainer.train_dataset[0]
    assert ours["input_ids"] == theirs["input_ids"] == by_transformers(tokenizer, TALK)
    assert ours["labels"] == theirs["labels"]


def test_pairs_are_to_us_what_they_are_to_trl(model, tmp_path):
    tokenizer = load_processor(model)
    (ours,) = tokenize_answers([line(PAIR)], tokenizer, 999, {})
    assert not ours.pop("is_cut")
    arguments = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    trainer = DPOTrainer(
        str(model), args=arguments, train_dataset=Dataset.from_list([PAIR]), processing_class=tokenizer
    )
    theirs = trainer.train_dataset[0]
    assert all(ours[name] == theirs[name] for name in ANSWERS["preferences"].names)
    whole = by_transformers(tokenizer, PAIR["prompt"] + PAIR["chosen"])
    assert ours["prompt_ids"] + ours["chosen_ids"] == whole


def test_a_prompt_is_the_same_to_trainer_evaluation_and_transformers(model, stages, monkeypatch):
    """As the trainer of GRPO and the evaluation really ask the model; first tokens are there once."""
    tokenizer, asked = load_processor(model), {}
    sampled, generated = GRPOTrainer._generate, GenerationMixin.generate

    def sample(self, prompts):
        output = sampled(self, prompts)
        asked["trainer"] = output[0]
        return output

    def generate(self, *arguments, **options):
        rows = zip(options["input_ids"].tolist(), options["attention_mask"].tolist(), strict=True)
        asked["model"] = [[token for token, is_there in zip(*row, strict=True) if is_there] for row in rows]
        return generated(self, *arguments, **options)

    monkeypatch.setattr(GRPOTrainer, "_generate", sample)
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    job = replace(stages.job("rlvr1", model.name, 1), parent_model=model)
    train_rank(job)
    rows = [json.loads(text) for text in job.train_split.read_text().splitlines()[: job.config.rows_per_step]]
    expected = [by_transformers(tokenizer, prompt_of(row), add_generation_prompt=True) for row in rows]
    group = job.config.grpo.num_generations_per_prompt
    assert asked["trainer"] == asked["model"] == [ids for ids in expected for _ in range(group)]
    assert all(ids.count(tokenizer.bos_token_id) == 1 for ids in expected) or tokenizer.bos_token is None
    list(rollouts(load_model(model), tokenizer, rows, max_new_tokens=2, temperature=0.0, seed=0))
    assert sorted(asked["model"]) == sorted(expected)
    shown = BACKEND.shown_rows(_Shown(job, model, stages.recipe), 3)
    assert [row["parts"][0]["ids"] for row in shown] == expected[:3]


class _Shown:
    """What is read of a stage to show its rows."""

    def __init__(self, job, model, recipe) -> None:
        self.name, self.config, self.train_split, self.parent_export = job.stage, job.config, job.train_split, model
        self.recipe = recipe


@pytest.mark.parametrize("stage", ["sft", "dpo", "rlvr1"])
def test_what_a_stage_publishes_talks_as_its_parent_whatever_trainers_save(stages, tmp_path, stage):
    """Pad and end are one token here, which TRL and transformers write into the settings that they save (trap 53)."""
    folder = tmp_path / "model"
    save_pretrained("llama", folder, chat_template=MARKED, pad_token="<|im_end|>")
    write_json(folder / "generation_config.json", {"eos_token_id": [2], "temperature": 0.6, "do_sample": True})
    settings = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    of = Stages(tmp_path / "blends", ROOT / "tests/algorithms.yaml") if stage == "dpo" else stages
    job = replace(of.job(stage, f"published {stage}", 1), parent_model=folder)
    train_rank(job)
    saved = checkpoint(job.run, 1)
    assert read_json(saved / "generation_config.json") != read_json(folder / "generation_config.json")
    take_settings(folder, saved)
    published = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert {name: published[name] for name in settings if name != "config.json"} == {
        name: content for name, content in settings.items() if name != "config.json"
    }
