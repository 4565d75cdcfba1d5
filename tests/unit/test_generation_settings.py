"""What a model's folder asks of sampling: told in one line, left out of what is sampled, and no part of any identity
but where an earlier commit followed it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.backends.trl.checks import check_sampling
from scripts.commands.checks import findings
from scripts.commands.project import Project
from scripts.evaluate.benchmarks import read_scores
from scripts.files import read_json, write_json
from scripts.finding import Moment
from scripts.model.generation_settings import (
    BY_RECIPE,
    folder_without_sampling,
    followed_for,
    settings_asked,
    tokens_of,
    words_of,
)
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.sampling import words_of_decoding
from scripts.recipe.site import Site
from scripts.report.pages import write_environments_page
from scripts.report.scores import sampling_sentences
from scripts.report.stage_page import main as write_stage_page
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage
from scripts.stage.store import identity_of
from tests.conftest import SHORT
from tests.report_files import evaluation, write_stage

QWEN = {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
TOKENS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "transformers_version": "5.0.0"}
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's folder as far as its settings are read."""
    made = tmp_path / "made"
    made.mkdir()
    write_json(made / "config.json", {"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 4096})
    return made


def ask(folder: Path, **settings: Any) -> Path:
    write_json(folder / "generation_config.json", TOKENS | settings)
    return folder


def test_tokens_and_neutral_values_ask_for_nothing(folder):
    assert settings_asked(folder) == {}
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "do_sample": False, "num_beams": 1}
    assert settings_asked(ask(folder, **neutral, use_cache=False, output_scores=True, min_p=None)) == {}
    assert settings_asked(ask(folder, **QWEN)) == QWEN
    assert tokens_of(folder) == {name: TOKENS[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def test_without_the_file_the_models_config_is_asked_as_transformers_does(folder):
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 2, "no_repeat_ngram_size": 3})
    assert settings_asked(folder) == {"no_repeat_ngram_size": 3}
    with folder_without_sampling(folder) as read:
        assert read_json(read / "generation_config.json") == {"eos_token_id": 2}
        assert (read / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not read.exists() and not (folder / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("settings", "decoding", "followed"),
    [
        (LLAMA, GREEDY, []),
        (LLAMA, SAMPLED, ["top_p"]),
        (LLAMA, SAMPLED | {"top_p": 0.95}, []),
        (QWEN, GREEDY, ["repetition_penalty"]),
        (QWEN, SAMPLED, ["repetition_penalty", "top_p"]),
        ({"min_p": 0.1}, SAMPLED, ["min_p"]),
        ({"min_p": 0.1}, SAMPLED | {"min_p": 0.2}, []),
        ({"max_length": 4096, "max_new_tokens": 2048, "do_sample": True}, SAMPLED, []),
        ({"suppress_tokens": [5], "num_beams": 4}, GREEDY, ["num_beams", "suppress_tokens"]),
    ],
)
def test_only_settings_that_changed_a_response_make_earlier_scores_others(folder, settings, decoding, followed):
    assert followed_for(ask(folder, **settings), decoding) == followed


def test_a_folders_wishes_are_one_line_with_the_recipes_keys():
    says = words_of(QWEN | {"bad_words_ids": [[number] for number in range(99)]}, "evaluation.*")
    start = "generation_config.json of the model asks for do_sample True, repetition_penalty 1.1, temperature 0.7, "
    assert says.startswith(start) and len(says) < 330
    assert says.endswith("evaluation.* of the recipe decides (its keys repetition_penalty, temperature, top_k, top_p)")
    assert words_of({"num_beams": 4}, "source.*").endswith(
        "asks for num_beams 4; not used: source.* of the recipe decides"
    )


def test_how_responses_were_sampled_is_said_in_words():
    assert words_of_decoding({"max_new_tokens": 32, "temperature": 0.0, "seed": 0}) == "greedy, at most 32 tokens"
    more = {"max_new_tokens": 32, "temperature": 0.7, "seed": 3, "top_k": 20, "repetition_penalty": 1.1}
    expected = "temperature 0.7, top_p 1, seed 3, at most 32 tokens, top_k 20, repetition_penalty 1.1"
    assert words_of_decoding(more) == expected


# --- stages ---


@pytest.fixture
def staged(tmp_path, folder):
    """A function that returns a stage of rollouts which starts from the folder; `generation` is said in the recipe."""
    results = tmp_path / "results"
    for hf in (results / "model/hf", results / "sft/hf"):
        hf.mkdir(parents=True)
        (hf / "model").symlink_to(folder)
        record = {"stage": "sft", "step": 1, "identity": "0", "content": "made", "files": {}}
        write_json(hf / "record.json", record)

    def made(**generation: Any) -> Stage:
        text = yaml.safe_load(SHORT.read_text())
        text["model"] = {"name": str(folder)}
        text["stages"]["rlvr1"]["policy"] = {"generation": generation}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(text))
        recipe = load_recipe(tmp_path / "recipe.yaml")
        splits = {name: {"sha256": name, "rows": 64} for name in ("train", "validation")}
        for stage in recipe.stages.values():
            write_json(results / f"data/{stage.blend}/manifest.json", splits)
        return Stage(recipe, results, "rlvr1")

    return made


def test_a_stages_identity_is_another_only_where_its_rollouts_followed_the_folder(staged, folder):
    plain = staged().identity
    for without_effect in ({}, QWEN, LLAMA, {"max_length": 4096}, {"use_cache": False}):
        ask(folder, **without_effect)
        assert staged().identity == plain and "sampled" not in staged().facts, without_effect
    for followed in ({"min_p": 0.1}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [5]}, {"num_beams": 4}):
        ask(folder, **followed)
        facts = staged().facts
        assert facts.pop("sampled") == BY_RECIPE and identity_of(facts) == plain, followed
    ask(folder, min_p=0.1)
    assert "sampled" not in staged(min_p=0.2).facts, "the recipe's own went before the folder's"
    assert "sampled" not in staged(backend="vllm").facts, "vLLM was handed every setting"
    assert "sampled" not in replace(staged(), name="sft").facts, "SFT samples nothing"


def test_a_penalty_on_repetition_is_part_of_a_config_where_it_is_said(staged):
    without = resolve_stage(staged().recipe, "rlvr1").values()["policy"]["generation"]
    penalised = staged(repetition_penalty=1.1)
    assert "repetition_penalty" not in without
    assert resolve_stage(penalised.recipe, "rlvr1").values()["policy"]["generation"]["repetition_penalty"] == 1.1
    kinds = [{each.metric for each in stage.settings.running_gate} for stage in (staged(), penalised)]
    assert kinds[0] - kinds[1] == {"peak_gen_kl_error"}, "the sampler's probabilities are others than the update's"


def unlikely_sampling(stage):
    """What is found of a stage's sampling."""
    return [finding.message for finding in check_sampling(Candidate(stage))]


def test_the_plan_names_once_what_the_folder_asks_for_and_who_decides(staged, folder):
    stage = staged()
    assert unlikely_sampling(stage) == []
    ask(folder, **QWEN)
    (told,) = unlikely_sampling(stage)
    assert "asks for do_sample True, repetition_penalty 1.1" in told
    assert "not used: evaluation.* and policy.generation.* of the recipe decides" in told
    found = findings(Project(stage.recipe, Site(name="here", threads=1), stage.results), Moment.PLAN)
    lines = [str(finding) for finding in found if "not used" in finding.message]
    of_sft = [line for line in lines if line.startswith("warning: sft: ")]
    assert len(of_sft) == 1 and "not used: evaluation.* of the recipe decides" in of_sft[0]
    assert sum("rlvr1" in line for line in lines) == 1


def test_a_penalty_with_a_pad_token_that_ends_is_warned_of(staged, folder):
    write_json(folder / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 2})
    (told,) = unlikely_sampling(staged(repetition_penalty=1.1))
    assert told.startswith("policy.generation.repetition_penalty: the model pads with its end token")
    assert unlikely_sampling(staged()) == []
    assert unlikely_sampling(staged(repetition_penalty=1.1, backend="vllm")) == []


# --- records and pages ---


def test_the_pages_say_how_responses_were_sampled_and_what_did_not_count(tmp_path):
    write_stage(tmp_path, "sft", algorithm="sft")
    decoding = {"max_new_tokens": 32, "temperature": 0.0, "seed": 0}
    scores = evaluation("sft", 0.25, 0.5) | {"decoding": decoding, "not_used": {"repetition_penalty": 1.1}}
    write_json(tmp_path / "sft/eval.json", scores)
    write_stage_page(tmp_path / "sft", None, tmp_path / "stage.html")
    other = evaluation("rlvr1", 0.5, 0.5) | {"decoding": decoding}
    write_environments_page([scores, other], tmp_path / "map.html")
    for page in ("stage.html", "map.html"):
        text = (tmp_path / page).read_text()
        assert "Sampled by evaluation of the recipe: greedy, at most 32 tokens." in text
        assert "asks for repetition_penalty 1.1; not used: evaluation.* of the recipe decides" in text
    assert "sft: generation_config.json of the model asks for" in (tmp_path / "map.html").read_text()
    assert sampling_sentences(evaluation("sft", None)) == [], "an early version recorded no decoding"


def test_a_benchmark_says_by_which_settings_it_generates(tmp_path):
    metrics = {"exact_match,none": 0.5, "exact_match_stderr,none": 0.1, "sample_len": 4}
    settings = {"do_sample": False, "max_gen_toks": 8}
    found = {
        "results": {"sums": metrics, "choice": metrics},
        "configs": {"sums": {"generation_kwargs": settings}, "choice": {}},
        "n-shot": {},
        "versions": {},
        "chat_template": None,
    }
    (tmp_path / "results_1.json").write_text(json.dumps(found))
    (sums,) = read_scores(tmp_path, "sums", None, "key").values()
    (choice,) = read_scores(tmp_path, "choice", None, "key").values()
    assert sums["generation"] == settings and "generation" not in choice
    record = {"stage": "sft", "content": "c", "benchmarks": {"sums": sums, "choice": choice}, "not_used": {"top_k": 20}}
    assert sampling_sentences(record) == [
        "sums is sampled by lm-eval's settings of the task: do_sample False, max_gen_toks 8.",
        "generation_config.json of the model asks for top_k 20; not used: evaluation.* of the recipe decides "
        "(its keys top_k).",
    ]
