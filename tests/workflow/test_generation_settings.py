"""No setting of a model folder's generation_config.json counts but its tokens, whoever samples: every field is tried.

What is in effect is what transformers prepares for a real `generate`.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("trl")

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import GRPOConfig
from trl.generation import vllm_generation

from scripts.backends.trl import distillation_trainer, grpo_trainer
from scripts.evaluate.tasks import run_harness, settings_of, settings_of_model
from scripts.evaluate.turns import EpisodeRunner
from scripts.files import describe_files, link_to, read_json, write_json
from scripts.model.generate import Sampler
from scripts.model.generation_settings import (
    ABOUT_THE_FILE,
    CHANGE_NO_TOKEN,
    NEUTRAL,
    TOKENS,
    folder_without_sampling,
    settings_asked,
)
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.recipe.evaluation import Evaluation, Task
from scripts.recipe.generated import GeneratedSource
from scripts.recipe.resolve import training_config
from scripts.sampling import sample
from scripts.stage.publish import export_name
from scripts.stage.tables import ROLLOUTS, read_table
from tests.conftest import ROOT, SHORT
from tests.pretrained import save_pretrained
from tests.stages import Stages

ODD: dict[str, Any] = {
    "max_length": 9,
    "max_new_tokens": 1,
    "min_length": 40,
    "min_new_tokens": 3,
    "early_stopping": True,
    "max_time": 0.001,
    "stop_strings": ["a"],
    "do_sample": True,
    "num_beams": 2,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.8,
    "min_p": 0.2,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[70], [71, 72]],
    "renormalize_logits": True,
    "forced_bos_token_id": 70,
    "forced_eos_token_id": 71,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [1, 2.0],
    "suppress_tokens": [70, 71],
    "begin_suppress_tokens": [72],
    "sequence_bias": [[[70], 5.0]],
    "token_healing": True,
    "guidance_scale": 2.0,
    "watermarking_config": {"greenlist_ratio": 0.4, "bias": 3.0},
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 70,
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "prompt_lookup_num_tokens": 2,
    "max_matching_ngram_size": 2,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "ngram",
    "disable_compile": True,
    "continuous_batching_config": {"block_size": 8},
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": [[70]],
    "force_words_ids": [[70]],
    "prefill_chunk_size": 4,
    "of_the_folders_own": 3,
}
"""A value other than the default of each field, and a field that transformers does not know."""
IN_NO_FILE = {"compile_config": {"mode": "default"}}
"""Fields that transformers refuses to read from a file."""
BESIDE = {"num_return_sequences": {"do_sample": True}}
"""What a field needs beside it, or transformers refuses the file."""
OF_THE_MODEL = {
    "eos_token_id": "ends an answer, as training taught the model",
    "pad_token_id": "fills a batch and is masked",
    "bos_token_id": "begins a sequence; prompts have it by the template",
}
"""The fields that count as they stand in the folder, and why."""
FIELDS = [name for name in GenerationConfig().to_dict() if name not in {*OF_THE_MODEL, *ABOUT_THE_FILE}]
ROW = {"responses_create_params": {"input": "Which is larger, 12 or 3?"}}


def test_every_field_of_transformers_is_either_the_models_own_or_tried():
    assert {*FIELDS, "of_the_folders_own"} == {*ODD, *IN_NO_FILE}
    assert {*OF_THE_MODEL} == {*TOKENS}
    for name, value in IN_NO_FILE.items():
        with pytest.raises(ValueError, match=name):
            GenerationConfig.from_dict({name: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("asks") / "model"
    save_pretrained("llama", made)
    return made


@pytest.fixture
def ask(folder):
    """Let the folder's generation_config.json ask for settings; the folder's text comes back afterwards."""
    file = folder / "generation_config.json"
    before = file.read_text()
    tokens = {name: value for name, value in read_json(file).items() if name in TOKENS}
    yield lambda **settings: write_json(file, tokens | settings)
    file.write_text(before)


@contextmanager
def prepared_for(model: Any):
    """Yield what transformers prepares for each `generate` of a model while the block runs, as plain settings."""
    found, prepare = [], model._prepare_generation_config

    def prepared(*arguments: Any, **options: Any) -> Any:
        result = prepare(*arguments, **options)
        settings = result[0].to_dict()
        found.append({name: value for name, value in settings.items() if name not in ABOUT_THE_FILE})
        return result

    model._prepare_generation_config = prepared
    yield found
    del model._prepare_generation_config


def each_field(folder: Path, ask: Callable[..., None], sample: Callable[[GenerationConfig], dict[str, Any]]) -> None:
    """Hold what is in effect under each odd value of the folder against what is in effect without any."""
    ask()
    plain = sample(GenerationConfig.from_pretrained(folder))
    for name, value in ODD.items():
        ask(**{name: value}, **BESIDE.get(name, {}))
        assert sample(GenerationConfig.from_pretrained(folder)) == plain, name
    tokens = read_json(folder / "generation_config.json")
    ask(eos_token_id=[tokens["eos_token_id"], 70])
    assert sample(GenerationConfig.from_pretrained(folder))["eos_token_id"] == [tokens["eos_token_id"], 70]


DECODINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "by the recipe": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
def test_a_sampler_follows_its_arguments_alone(folder, ask, decoding):
    model, processor = load_model(folder), load_processor(folder)

    def sample(settings: GenerationConfig) -> dict[str, Any]:
        model.generation_config = settings
        sampler = Sampler(model, processor, 3, seed=1, **decoding)
        with prepared_for(model) as found:
            list(sampler.respond([ROW]))
        return found[-1]

    each_field(folder, ask, sample)
    assert sample(GenerationConfig()).items() >= {name: each for name, each in decoding.items() if each}.items()


def test_turns_with_tools_are_sampled_by_the_same_arguments(folder, ask):
    model, processor = load_model(folder), load_processor(folder)
    ids = processor("Which is larger?")["input_ids"]

    def sample(settings: GenerationConfig) -> dict[str, Any]:
        model.generation_config = settings
        runner = EpisodeRunner.__new__(EpisodeRunner)
        runner._sampler, runner._tokenizer = Sampler(model, processor, 3, 0.0, 1), processor
        with prepared_for(model) as found:
            runner._generate_single_turn([ids, ids])
        return found[-1]

    each_field(folder, ask, sample)


KEYS = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "min_new_tokens": 8, "suppress_tokens": [70, 71]}


def test_a_folders_settings_change_no_response_greedy_or_sampled(folder, ask):
    def responses(temperature: float) -> list[str]:
        sampler = Sampler(load_model(folder), load_processor(folder), 12, temperature, 1)
        return [each.text for batch in sampler.respond([ROW] * 4) for each in batch.values()]

    ask()
    plain = [responses(temperature) for temperature in (0.0, 1.0)]
    ask(**KEYS, do_sample=True, temperature=0.1, top_p=0.1, top_k=1)
    assert [responses(temperature) for temperature in (0.0, 1.0)] == plain
    file = AutoModelForCausalLM.from_pretrained(folder)  # as transformers alone has it, it does
    file.generation_config.max_length = None
    ids = load_processor(folder)("Which is larger?", return_tensors="pt")["input_ids"]
    with prepared_for(file) as found:
        file.generate(ids, max_new_tokens=12)
    assert found[-1].items() >= KEYS.items()


def policy_job(folder: Path, directory: Path, algorithm: str, **changes: Any) -> Any:
    """The job of a stage of rollouts that starts from the folder, or (None) from random weights of its recipe."""
    recipe, stage = {
        "grpo": ("tests/short.yaml", "rlvr1"),
        "distillation": ("tests/distillation.yaml", "student"),
    }[algorithm]
    stages = Stages(directory, ROOT / recipe)
    roles = {} if algorithm == "grpo" else {"teachers.reasoning": folder, "teachers.choice": folder}
    job = stages.job(stage, "run", 1, parent_model=folder, roles=roles)
    values = job.config.values()
    values["policy"] |= {"max_total_sequence_length": 128} | changes
    values["policy"]["generation"] |= {"max_new_tokens": 3}
    values.pop("model", None)
    return replace(job, config=training_config(values))


def rollouts_in_effect(trainer: Any) -> dict[str, Any]:
    """Sample as the trainer does for a step, and return what was in effect."""
    ids = trainer._tokenizer("Which is larger, 12 or 3?")["input_ids"]
    numbers = () if isinstance(trainer, distillation_trainer.TurnsTrainer) else (2,)
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    with prepared_for(model) as found:
        trainer._generate_single_turn([ids, ids[:5]], None, {}, *numbers)
    return found[-1]


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("grpo", {}), ("grpo", {"skip_padding": True}), ("grpo", {"lora": {}}), ("distillation", {})],
    ids=["grpo", "without padding", "adapters", "distillation"],
)
def test_rollouts_follow_the_stage_alone_and_the_model_keeps_its_settings_to_be_saved(
    folder, ask, tmp_path, algorithm, changes
):
    makers = {"grpo": grpo_trainer.make_trainer, "distillation": distillation_trainer.make_trainer}
    ask(**KEYS, min_p=0.3)
    trainer = makers[algorithm](policy_job(folder, tmp_path, algorithm, **changes))
    policy = trainer.model.get_base_model() if "lora" in changes else trainer.model
    asked = policy.generation_config
    found = rollouts_in_effect(trainer)
    assert (found["repetition_penalty"], found["min_p"], found["min_new_tokens"]) == (1.0, None, None)
    assert policy.generation_config is asked and asked.to_dict().items() >= KEYS.items()

    def sample(settings: GenerationConfig) -> dict[str, Any]:
        policy.generation_config = settings
        given = rollouts_in_effect(trainer)
        return given | {"eos_token_id": tokens} if (tokens := settings.eos_token_id) else given

    each_field(folder, ask, sample)


def test_a_stages_penalty_on_repetition_reaches_transformers(folder, tmp_path):
    job = policy_job(folder, tmp_path, "grpo")
    values = job.config.values()
    values["policy"]["generation"] |= {"repetition_penalty": 1.3, "min_p": 0.1}
    trainer = grpo_trainer.make_trainer(replace(job, config=training_config(values)))
    found = rollouts_in_effect(trainer)
    assert (found["repetition_penalty"], found["min_p"]) == (1.3, 0.1)


def test_lm_eval_reads_a_folder_without_settings_of_sampling(folder, ask):
    """By the call with which lm-eval's model of transformers generates."""

    def sample(_: GenerationConfig) -> dict[str, Any]:
        with folder_without_sampling(folder) as read:
            model = AutoModelForCausalLM.from_pretrained(read)
        ids = load_processor(folder)("Which is larger?", return_tensors="pt")["input_ids"]
        with prepared_for(model) as found:
            model.generate(input_ids=ids, max_length=ids.shape[1] + 3, pad_token_id=0, use_cache=True, do_sample=False)
        return found[-1]

    each_field(folder, ask, sample)


def test_what_a_folder_asks_for_is_told_and_what_changes_no_token_is_not(folder, ask):
    for name, value in ODD.items():
        ask(**{name: value})
        assert settings_asked(folder) == ({} if name in CHANGE_NO_TOKEN else {name: value}), name
    ask(**NEUTRAL)
    assert settings_asked(folder) == {}
    assert json.loads((folder / "generation_config.json").read_text()).keys() >= NEUTRAL.keys()


# --- scores ---


QUESTIONS = ("Say one.", "Say two, briefly.", "Say three.")


@pytest.fixture
def scored(folder, ask, tmp_path):
    """A function that scores the folder, as a stage's export and start, on a few rows; it returns the run's results."""
    from scripts.evaluate import score

    results = tmp_path / "results"
    split, stage = results / "data/rlvr/val-split.jsonl", results / "rlvr"
    row = {"agent_ref": {"type": "responses_api_agents", "name": "instruction_following_simple_agent"}}
    row |= {
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
        "id": 1,
        "prompt": "",
        "grading_mode": "binary",
    }
    rows = [row | {"responses_create_params": {"input": text}, "prompt": text} for text in QUESTIONS]
    split.parent.mkdir(parents=True)
    split.write_text("".join(json.dumps(each) + "\n" for each in rows))
    training = results / "store/0123456789abcdef"
    (training / "exports").mkdir(parents=True)
    (stage / "hf").mkdir(parents=True)

    def run(start: Path | None = None, **settings: Any) -> dict[str, Any]:
        ask(**settings)
        files = describe_files(folder)
        content = export_name(files)
        export = training / "exports" / content
        if not export.exists():
            shutil.copytree(folder, export)
        link_to(stage / "hf/model", export)
        record = {"stage": "rlvr", "step": 1, "identity": "made", "content": content, "files": files}
        write_json(stage / "hf/record.json", record)
        score.main(
            recipe=tmp_path / "recipe.yaml",
            export=stage / "hf/record.json",
            start=start or stage / "hf/record.json",
            validation=[split],
            rollouts=stage / "rollouts.parquet",
            output=stage / "eval.json",
        )
        return read_json(stage / "eval.json")

    text = yaml.safe_load(SHORT.read_text())
    text["evaluation"] = {"max_new_tokens": 12}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(text))
    run.results, run.stored = results, training / "scores"
    return run


def test_scores_are_the_recipes_and_say_what_did_not_count(scored, capsys):
    def responses() -> list[str]:
        return read_table(scored.results / "rlvr/rollouts.parquet", ROLLOUTS)["response_after"].to_pylist()

    plain = scored()
    greedy, stored = responses(), {*scored.stored.iterdir()}
    assert "not_used" not in plain and plain["decoding"] == {"max_new_tokens": 12, "temperature": 0.0, "seed": 0}
    asked = scored(**KEYS)
    assert responses() == greedy and asked["not_used"] == KEYS and asked["decoding"] == plain["decoding"]
    assert len({*scored.stored.iterdir()} - stored) == 1
    capsys.readouterr()
    assert scored(**KEYS)["not_used"] == KEYS
    assert "from an earlier call" in capsys.readouterr().out, "the same question is not asked twice"


def test_a_parents_scores_that_followed_its_folder_are_told_beside_its_childs(scored, tmp_path, capsys):
    parent = tmp_path / "parent"
    scored(**KEYS)
    shutil.copytree(scored.results / "rlvr", parent, symlinks=True)
    scored(parent / "rollouts.parquet", **KEYS)
    assert "earlier version" not in capsys.readouterr().err
    record = read_json(parent / "eval.json")
    del record["not_used"]
    write_json(parent / "eval.json", record)
    shutil.rmtree(scored.stored)
    scored(parent / "rollouts.parquet", **KEYS)
    told = capsys.readouterr().err
    assert (
        f"{parent}/eval.json: an earlier version sampled these scores by min_new_tokens, no_repeat_ngram_size" in told
    )


def test_a_generated_source_samples_by_its_own_settings_and_its_engine_takes_all_of_them(folder, ask, scored):
    scored(**KEYS)
    source = {"kind": "generated", "by": "sft", "prompts": "rlvr1", "max_new_tokens": 3, "repetition_penalty": 1.2}
    made = GeneratedSource.model_validate(source | {"max_tool_calling_iterations": 2, "top_p": 0.9})
    engine = sample.engine_of("transformers", scored.results / "rlvr/hf/record.json", made.decoding, "cpu", 1)
    with prepared_for(engine.model) as found:
        list(engine.respond([ROW]))
    expected = {"repetition_penalty": 1.2, "top_p": 0.9, "min_new_tokens": None, "suppress_tokens": None}
    assert found[-1].items() >= expected.items()


class Engine:
    """In place of vLLM, which another environment has: its options, and the settings of the last call."""

    made: "Engine"

    def __init__(self, **options: Any) -> None:
        Engine.made, self.options = self, options

    def generate(self, prompts: Any, sampling_params: dict[str, Any], **_: Any) -> list[Any]:
        self.settings = sampling_params
        return [SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=[]) for each in prompts]


def test_a_colocated_vllm_is_handed_the_recipes_values_and_defaults_of_its_own(folder, tmp_path, monkeypatch):
    """By TRL's own code around the engine; the real engine is in tests/workflow/test_vllm.py."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    job = policy_job(folder, tmp_path, "grpo")
    values = job.config.values()
    asked = {"temperature": 0.9, "top_p": 0.8, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.3}
    values["policy"]["generation"] |= asked | {"backend": "vllm", "stop_token_ids": [70]}
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        **grpo_trainer.sampling_arguments(replace(job, config=training_config(values))),
    )
    model = load_model(folder)
    model.name_or_path = str(folder)
    options = {name: getattr(arguments, name) for name in (*asked, "max_completion_length", "generation_kwargs")}
    generation = vllm_generation.VLLMGeneration(model, Accelerator(cpu=True), None, mode="colocate", **options)
    generation.generate([[1, 2]], None, 2)
    assert Engine.made.options["generation_config"] == "vllm" and Engine.made.options["model"] == str(folder)
    assert Engine.made.settings == asked | {"max_tokens": 3, "stop_token_ids": [70], "n": 1, "logprobs": 0}


SAY = """
task: say
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/say.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "Which is larger, {{{{a}}}} or {{{{b}}}}?"
doc_to_target: "{{{{b}}}}"
generation_kwargs: {{until: ["\\n\\n\\n\\n"], max_gen_toks: 16, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.skipif(not (ROOT / ".lm-eval/installed").exists(), reason="lm-eval is not installed: make lm-eval")
def test_lm_evals_answers_are_those_of_a_folder_that_asks_for_nothing(folder, ask, tmp_path, monkeypatch):
    """By the real lm-eval, on a task that generates."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/say.yaml").write_text(SAY.format(folder=tmp_path / "tasks"))
    (tmp_path / "tasks/say.jsonl").write_text("".join(f'{{"a": {number}, "b": 9}}\n' for number in range(4)))
    task = Task(task="say", include_path=str(tmp_path / "tasks"))

    def answers(read: Path, name: str) -> list[Any]:
        settings = settings_of(task) | settings_of_model(read, "cpu", Evaluation(tasks=[task]))
        (tmp_path / name).mkdir()
        run_harness(settings, ROOT / ".lm-eval", tmp_path / name)
        (samples,) = (tmp_path / name).rglob("samples_say_*.jsonl")
        return [json.loads(line)["resps"] for line in samples.read_text().splitlines()]

    ask()
    plain = answers(folder, "plain")
    ask(**KEYS, max_new_tokens=3)
    with folder_without_sampling(folder) as read:
        assert answers(read, "asked") == plain
