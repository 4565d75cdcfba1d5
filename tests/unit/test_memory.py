"""What a training needs of its device's memory, whether that fits, and what a stage that runs out of it is told."""

import json
import math
import re
import struct
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers

from scripts.backends.trl.checks import check_cut_answers, check_settings
from scripts.backends.trl.placing import estimate, memory_of_machine, out_of_memory, sentence
from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.files import amount
from scripts.model.shape import Shape
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import AnyStage
from scripts.recipe.resolve import sync_configs
from scripts.recipe.site import Site
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage
from scripts.train.preflight import check_stage
from tests.conftest import ROOT
from tests.pretrained import ARCHITECTURES, save_pretrained
from tests.stages import ready_stage

needs_torch = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")


def parts_of(shape: Shape, algorithm: str = "sft", rows: int = 16, length: int = 1024, ranks: int = 1, **says):
    """The estimate of a stage of these settings; `kl` is that of its loss, the rest its policy's."""
    stage = {"algorithm": algorithm, "blend": "b", algorithm: {"max_num_steps": 2}}
    if "kl" in says:
        stage["loss_fn"] = {"reference_policy_kl_penalty": says.pop("kl")}
    stage["policy"] = {"max_total_sequence_length": length, "optimizer": {"lr": 1e-5}, **says}
    if algorithm == "grpo":
        stage["grpo"] |= {"num_prompts_per_step": rows // 4, "num_generations_per_prompt": 4}
        stage["policy"]["generation"] = {"max_new_tokens": length // 2} | says.pop("generation", {})
    else:
        stage["policy"]["train_global_batch_size"] = rows
    settings = TypeAdapter(AnyStage).validate_python(stage)
    return estimate(shape, settings, length, ranks, capacity=80e9)


def save_headers(folder: Path, hidden: int, inner: int, layers: int, vocabulary: int) -> None:
    """A model of this shape in bfloat16 whose weights are a hole in the file."""
    tensors = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    for number in range(layers):
        layer = f"model.layers.{number}."
        tensors |= {f"{layer}self_attn.{name}_proj.weight": [hidden, hidden] for name in "qo"}
        tensors |= {f"{layer}self_attn.{name}_proj.weight": [hidden // 4, hidden] for name in "kv"}
        tensors |= {f"{layer}mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
        tensors |= {f"{layer}mlp.down_proj.weight": [hidden, inner]}
        tensors |= {f"{layer}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    tensors["model.norm.weight"] = [hidden]
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    folder.mkdir()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 512, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of 8 billion parameters, as far as its headers tell."""
    folder = tmp_path_factory.mktemp("models") / "8b"
    save_headers(folder, hidden=4096, inner=14336, layers=32, vocabulary=128256)
    # the note of a first preflight, without which every preflight here reads 16 GB
    folder.with_name(f"{folder.name}.finite.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def shape(model) -> Shape:
    return Shape.of_folder(model)


@needs_torch
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shape_counts_the_parameters_of_any_architecture(tmp_path, architecture):
    from transformers import AutoModelForCausalLM

    save_pretrained(architecture, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    shape = Shape.of_folder(tmp_path / "model")
    assert shape.parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert shape.layers == loaded.config.num_hidden_layers


def test_weights_gradients_and_moments_are_counted_by_what_is_trained(shape):
    count = shape.parameters
    assert 8.0e9 < count < 8.1e9
    full, lora = parts_of(shape), parts_of(shape, precision="bfloat16", lora={"dim": 16})
    assert full["weights"] == 4 * count and full["moments"] == 8 * count
    adapters = 16 * sum(map(sum, shape.linear_layers))
    assert lora["weights"] == 2 * count + 4 * adapters and lora["moments"] == 8 * adapters
    assert (
        parts_of(shape, precision="bfloat16", lora={"dim": 16, "quantization": "nf4"})["weights"] < lora["weights"] / 3
    )


def test_processes_share_what_is_sharded(shape):
    sharded = parts_of(shape, ranks=4, dtensor_cfg={"enabled": True})
    assert parts_of(shape, ranks=4)["weights"] == 4 * sharded["weights"] == 4 * shape.parameters


def test_a_reference_is_held_where_no_adapter_can_be_taken_off(shape):
    plain = 4 * shape.parameters
    assert parts_of(shape, "dpo")["weights"] == parts_of(shape, "grpo", kl=0.1)["weights"] == 2 * plain
    assert parts_of(shape, "grpo")["weights"] == parts_of(shape, "sft")["weights"] == plain
    assert parts_of(shape, "dpo", lora={"dim": 8})["weights"] < 1.01 * plain


def test_activations_grow_with_the_rows_at_once_and_shrink_by_checkpointing(shape):
    whole, one = parts_of(shape, rows=8), parts_of(shape, rows=8, train_micro_batch_size=1)
    assert whole["activations"] == 8 * one["activations"] == 8 * parts_of(shape, ranks=8, rows=8)["activations"]
    assert parts_of(shape, "dpo", rows=8)["activations"] == 2 * whole["activations"]
    again = parts_of(shape, rows=8, dtensor_cfg={"activation_checkpointing": True})
    assert again["activations"] < whole["activations"] / 8
    sampled = parts_of(shape, "grpo", rows=256, length=2048, train_micro_batch_size=1, precision="bfloat16")
    kept = 2 * 32 * shape.key_value_heads * 128 * 2 * 256 * 2048
    assert sampled["activations"] + sampled["logits"] + sampled["sampling"] == kept


def test_vllm_takes_its_share_unless_it_sleeps(shape):
    def share(**says):
        return parts_of(shape, "grpo", rows=8, generation={"backend": "vllm"} | says).get("vLLM")

    assert share() == 24e9 and share(vllm_cfg={"gpu_memory_utilization": 0.5}) == 40e9
    assert share(vllm_cfg={"enable_sleep_mode": True}) is None


@pytest.fixture
def results(tmp_path, monkeypatch, model):
    """The tiny recipe's sft from the large model, its data there; the results folder and the recipe."""
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_load((ROOT / "config/recipes/tiny.yaml").read_text())
    path = tmp_path / "recipe.yaml"
    text["stages"]["sft"]["policy"] = text["stages"]["sft"].get("policy", {}) | {"lora": {"dim": 8}}
    path.write_text(yaml.safe_dump(text | {"model": {"name": str(model)}}))
    recipe = load_recipe(path)
    (tmp_path / "results/model/hf").mkdir(parents=True)
    (tmp_path / "results/model/hf/model").symlink_to(model)
    sync_configs(recipe, tmp_path / "results")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ready_stage(recipe, tmp_path / "results", "sft", [row] * 100)
    return tmp_path / "results", recipe


@pytest.fixture
def by_words(results, model):
    """The stage sft of `results`, whose model has a token a word."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    yield Stage(results[1], results[0], "sft")
    (model / "tokenizer.json").unlink()


def test_the_plan_tells_and_the_preflight_refuses_what_cannot_fit_unless_the_site_says_so(results):
    folder, recipe = results
    small = Site(name="small", threads=2, accelerator="cuda", gpu_memory_gb=24, try_batch=False)
    text = plan_text(Project(recipe, small, folder))
    assert "the preflight will refuse sft: a process needs about " in text and "(weights 32." in text
    stage = Stage(recipe, folder, "sft")
    with pytest.raises(UserError, match=r"a GPU of site small \(gpu_memory_gb\) has 25.8 GB; lower policy.train_micro"):
        check_stage(stage, small)
    check_stage(stage, small.model_copy(update={"refuse_over_memory": False}))
    check_stage(stage, small.model_copy(update={"gpu_memory_gb": 640}))


def test_all_stages_of_the_chain_are_judged_before_the_first_trains(results):
    folder, recipe = results
    middle = Site(name="middle", threads=2, accelerator="cuda", gpu_memory_gb=60, try_batch=False)
    assert sentence(Stage(recipe, folder, "sft"), middle)[1] is not False
    with pytest.raises(UserError, match=r"rlvr1: a process needs about .*weights 32.*moments 64"):
        check_stage(Stage(recipe, folder, "sft"), middle)


def test_the_rows_lengths_count_where_they_are_there_and_rows_that_are_not_may_be_short(by_words):
    policy = by_words.settings.policy.model_copy(update={"max_total_sequence_length": 1 << 17})
    stages = {"sft": by_words.settings.model_copy(update={"policy": policy})}
    stage = replace(by_words, recipe=by_words.recipe.model_copy(update={"stages": stages}))
    site = Site(name="middle", threads=2, accelerator="cuda", gpu_memory_gb=60)
    says, fits = sentence(stage, site)
    assert " tokens of its longest row of the 64.4 GB" in says and fits
    # counted once, for the stages before it too
    (record,) = stage.manifest.parent.glob("measured/*/lengths-*.json")
    counted = record.stat().st_mtime_ns
    assert sentence(replace(stage), site) == (says, fits) and record.stat().st_mtime_ns == counted
    split = stage.train_split.read_bytes()
    stage.train_split.unlink()
    says, fits = sentence(stage, site)
    assert " at 131072 tokens, the limit of a row, but a GPU of site middle" in says and fits is None
    stage.train_split.write_bytes(split.replace(b'"b"', b'"' + b"b " * 30_000 + b'"', 1))
    says, fits = sentence(stage, site)
    assert " at 30001 tokens of its longest row, but" in says and fits is False


def test_settings_that_ruin_a_training_are_told_in_figures_before_it(by_words, model):
    assert [*check_settings(Candidate(by_words)), *check_cut_answers(Candidate(by_words))] == []
    split = by_words.train_split.read_text()
    by_words.train_split.write_text(split.replace('"b"', '"' + "b " * 200 + '"'))
    (cut,) = check_cut_answers(Candidate(by_words))
    assert re.fullmatch(
        r"evaluation.max_new_tokens is \d+, which 100% of the first rows' answers reach: .*", cut.message
    )
    config = model / "config.json"
    known = config.read_text()
    config.write_text(json.dumps(json.loads(known) | {"max_position_embeddings": 50, "vocab_size": 50}))
    evaluation = by_words.recipe.evaluation.model_copy(update={"stop_token_ids": [2, 51]})
    recipe = by_words.recipe.model_copy(update={"evaluation": evaluation})
    found = [finding.message for finding in check_settings(Candidate(replace(by_words, recipe=recipe)))]
    config.write_text(known)
    assert found[0] == "a sequence has up to 96 tokens, but the model's max_position_embeddings are 50"
    assert found[1] == "evaluation.stop_token_ids: no response ends at [51]; the vocabulary has 50 tokens"


def test_what_a_process_has_is_what_the_site_says(results):
    folder, recipe = results
    stage = Stage(recipe, folder, "sft")

    def fits(processes=1, **says):
        return sentence(stage, Site(name="s", threads=2, **says, processes=processes))

    assert fits(accelerator="auto") == (fits(accelerator="auto")[0], True)
    assert " of the 687.2 GB of a GPU of site s " in fits(accelerator="cuda", gpu_memory_gb=640)[0]
    says, ok = fits(processes=2, slurm={})
    assert "the job (resources.mem_mb) has 2.0 GB" in says and not ok
    assert ("this machine has" in fits()[0]) == (memory_of_machine() < 4e10)


def test_a_model_of_no_known_kind_is_never_refused(results, model):
    folder, recipe = results
    unknown = folder / "model/unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"n_embd": 8}')
    (folder / "model/hf/model").unlink()
    (folder / "model/hf/model").symlink_to(unknown)
    assert sentence(Stage(recipe, folder, "sft"), Site(name="s", threads=2)) == ("", True)


@needs_torch
def test_a_training_out_of_memory_ends_with_what_needs_less_and_where_it_goes_on(results, tmp_path):
    import torch

    from scripts.backends.protocol import StopRequest, TrainingJob

    folder, recipe = results
    job = TrainingJob.of(Stage(recipe, folder, "sft"), max_num_steps=4, threads=1, stop=StopRequest())
    (job.run / "saving").mkdir(parents=True)
    job.training.seal(job.run / "saving", 3)

    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    words = out_of_memory(error.value, job)
    assert "sft: out of memory: " in words and "can't allocate memory" in words
    assert "lower policy.train_micro_batch_size" in words and "The stage resumes from step 3" in words
    assert out_of_memory(RuntimeError("of another kind"), job) is None


def test_of_several_teachers_the_largest_counts(model, tmp_path, monkeypatch):
    save_headers(tmp_path / "large", hidden=8192, inner=28672, layers=80, vocabulary=128256)
    teachers = {"teachers.reasoning": model, "teachers.choice": tmp_path / "large", "teachers.later": tmp_path / "none"}
    monkeypatch.setattr(Stage, "parent_export", model)
    stage = Stage(load_recipe(ROOT / "tests/distillation.yaml"), tmp_path, "student")
    for accelerator, width, exports in (("cuda", 2, teachers), ("cpu", 4, teachers), ("cuda", 2, {})):
        monkeypatch.setattr(Stage, "role_exports", exports)
        says, _ = sentence(stage, Site(name="here", threads=2, accelerator=accelerator, gpu_memory_gb=80))
        size = amount(width * Shape.of_folder(tmp_path / "large").parameters)
        assert (f"teacher {size}" in says) == bool(exports), says
