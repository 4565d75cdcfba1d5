"""A stage made small for a try: its rows, its numbers, the layers of its model."""

import json
from dataclasses import replace

import pytest

from scripts.backends.trl.small_job import longest_rows, small_job
from tests.stages import Stages
from tests.trials import ALGORITHMS, write_recipe

small_model = pytest.importorskip("scripts.backends.trl.small_model")


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Stages:
    """The stages of every algorithm on rows without pictures."""
    folder = tmp_path_factory.mktemp("small")
    return Stages(folder, write_recipe(folder / "small.yaml"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_small_job_keeps_the_settings_and_trains_two_short_steps(stages, algorithm, tmp_path):
    job = stages.job(algorithm, algorithm, 4)
    small = small_job(job, tmp_path, most_tokens=100, on_cpu=True).job
    assert small.config.section.max_num_steps == 2
    assert small.config.rows_per_step <= 4
    assert small.run.is_relative_to(tmp_path) and small.train_split.is_relative_to(tmp_path)
    own, cut = job.config.values(), small.config.values()
    assert own["policy"]["optimizer"] == cut["policy"]["optimizer"]
    assert own.get("loss_fn") == cut.get("loss_fn")
    rows = [json.loads(line) for line in small.train_split.read_text().splitlines()]
    assert len(rows) == 2 * small.config.rows_per_step


def test_vllm_and_gym_are_left_to_the_training_and_named(stages, tmp_path):
    job = stages.job("grpo", "vllm", 4)
    values = job.config.values()
    values["policy"]["generation"]["backend"] = "vllm"
    values["loss_fn"]["use_importance_sampling_correction"] = True
    sampled = job.config.of_config(values)
    small = small_job(replace(job, config=sampled), tmp_path, 100, on_cpu=False)
    assert not small.job.config.samples_by_vllm
    assert small.remarks == ["the rollouts were sampled by transformers, not by vLLM"]


def test_a_small_job_ends_by_its_steps_alone(stages, tmp_path):
    job = stages.job("sft", "early", 40)
    values = job.config.values() | {"stop_when": {"metric": "validation_loss", "patience": 2, "val_period": 10}}
    stopping = replace(job, config=job.config.of_config(values))
    assert stopping.config.stopping is not None
    assert small_job(stopping, tmp_path, 100, on_cpu=True).job.config.stopping is None


def test_the_longest_rows_that_fit_come_first_then_the_shortest_of_the_others(tmp_path):
    split = tmp_path / "rows.jsonl"
    split.write_text("".join("x" * length + "\n" for length in (3, 50, 7, 90, 5)))
    assert [number for number, _ in longest_rows(split, 4, 10, by_environment=False)] == [3, 5, 1, 2]


LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("more", "kept", "wanted"),
    [
        ({}, [0, 1], {"num_hidden_layers": 2}),
        ({"num_hidden_layers": 1}, [0], {"num_hidden_layers": 1}),
        (
            {"layer_types": ["sliding"] * 5 + ["full"] + ["sliding"] * 26},
            [0, 5],
            {"layer_types": ["sliding", "full"], "num_hidden_layers": 2},
        ),
        ({"first_k_dense_replace": 3}, [0, 3], {"first_k_dense_replace": 1}),
        (
            {"mlp_only_layers": [1, 9], "no_rope_layers": [1] * 32},
            [0, 1],
            {"mlp_only_layers": [1], "no_rope_layers": [1, 1]},
        ),
        (
            {"num_hidden_layers": 6, "hybrid_override_pattern": "MEMEM*"},
            [0, 1, 5],
            {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3},
        ),
        ({"num_hidden_layers": 2, "eos_token_id": [1, 2]}, [0, 1], {"eos_token_id": [1, 2]}),
    ],
)
def test_a_model_keeps_a_layer_of_each_kind(more, kept, wanted):
    decoder = LLAMA | more
    config = {"model_type": "any", "text_config": decoder}
    assert small_model.kept_layers(decoder) == kept
    cut = small_model.cut_to(config, kept)["text_config"]
    assert {name: cut[name] for name in wanted} == wanted
    assert cut["hidden_size"] == 4096


def test_a_narrow_model_keeps_the_size_of_a_head_and_the_vocabulary():
    narrow = small_model.narrow(LLAMA | {"vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8}, 8)
    assert narrow["head_dim"] == 128 and narrow["vocab_size"] == 151_936
    assert (narrow["hidden_size"], narrow["num_attention_heads"], narrow["num_key_value_heads"]) == (512, 4, 1)
    assert narrow["num_experts"] == 8
