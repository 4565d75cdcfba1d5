"""What a training needs of its device's memory, whether that fits, and what a stage that runs out of it is told."""

import json
import math
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from scripts.backends.trl.fit import (
    Device,
    changes_that_fit,
    device_of,
    load_of,
    shape_of,
    telling_out_of_memory,
    why_not,
)
from scripts.backends.trl.memory import Load, layer_bytes, need
from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.model.shape import Shape
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import AnyStage
from scripts.recipe.resolve import sync_configs
from scripts.recipe.site import Site
from scripts.recipe.stage import Resources
from scripts.stage.stage import Stage
from scripts.train.preflight import check_stage
from tests.conftest import ROOT
from tests.pretrained import ARCHITECTURES, save_pretrained
from tests.stages import ready_stage

GPU = 24 * 2**30
needs_torch = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")


def stage_of(algorithm: str = "sft", rows: int = 16, length: int = 1024, **policy):
    """A stage's settings."""
    says = {"algorithm": algorithm, "blend": "b", algorithm: {"max_num_steps": 2}}
    says["policy"] = {"max_total_sequence_length": length, "optimizer": {"lr": 1e-5}, **policy}
    if algorithm == "grpo":
        says["grpo"] |= {"num_prompts_per_step": rows // 4, "num_generations_per_prompt": 4}
        says["policy"]["generation"] = {"max_new_tokens": length // 2}
    else:
        says["policy"]["train_global_batch_size"] = rows
    return TypeAdapter(AnyStage).validate_python(says)


def load(shape: Shape, stage, ranks: int = 1, device: str = "cuda", capacity: float = GPU) -> Load:
    return Load(shape, stage, stage.policy, ranks, device, capacity)


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
    assert shape.vocabulary == loaded.config.vocab_size and shape.layers == loaded.config.num_hidden_layers


@needs_torch
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"dim": 2}])
def test_what_a_layer_keeps_is_what_autograd_saves_of_it(precision, lora):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    stage = stage_of(precision=precision, lora=lora)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=64, num_hidden_layers=6, **sizes)
    frozen = torch.bfloat16 if lora and precision == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_config(config).to(frozen)
    shape = Shape(256, 704, 6, 4, 2, 64, 1, {name: [*value.shape] for name, value in model.state_dict().items()})
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    of_weights = {sides for weight in model.parameters() for sides in (tuple(weight.shape), tuple(weight.shape[::-1]))}
    saved = {}

    def keep(tensor):
        if tuple(tensor.shape) not in of_weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.arange(2 * 48).view(2, 48) % 64
    backbone = (model.get_base_model() if lora else model).model
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"),
    ):
        backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    measured = sum(storage.nbytes() for storage in saved.values()) / ids.numel() / 6
    assert 0.9 < layer_bytes(load(shape, stage)) / measured < 1.1


def test_weights_gradients_and_moments_are_counted_by_what_is_trained(shape):
    def parts(**policy):
        return need(load(shape, stage_of(rows=2, length=16, train_micro_batch_size=1, **policy))).parts

    count = shape.parameters
    assert 8.0e9 < count < 8.1e9
    full, half, lora = parts(), parts(precision="bfloat16"), parts(precision="bfloat16", lora={"dim": 16})
    assert full["weights"] == half["weights"] == 4 * count and full["gradients"] == 4 * count
    assert full["optimizer"] == 8 * count and parts(optimizer={"lr": 1, "name": "adamw_8bit"})["optimizer"] < 4 * count
    assert half["copies"] == 2 * shape.matrices if "copies" in half else half["optimizer's work"] == 4 * count
    adapters = 16 * sum(map(sum, shape.linear_layers.values()))
    assert lora["weights"] == 2 * count + 4 * adapters and lora["optimizer"] == 8 * adapters
    assert parts(precision="bfloat16", lora={"quantization": "nf4"})["weights"] < 0.4 * lora["weights"]


def test_processes_share_what_is_sharded_and_copy_gradients_otherwise(shape):
    def parts(ranks, **placing):
        stage = stage_of(rows=8, length=16, train_micro_batch_size=1, dtensor_cfg=placing)
        return need(load(shape, stage, ranks)).parts

    assert parts(4)["gradient buckets"] == 4 * shape.parameters
    assert parts(4, enabled=True)["optimizer"] == 2 * shape.parameters
    assert "optimizer" not in parts(4, enabled=True, cpu_offload=True)
    assert parts(1, enabled=True)["optimizer"] == 8 * shape.parameters


def test_a_reference_is_held_where_no_adapter_can_be_taken_off(shape):
    def reference(algorithm, kl=0.0, **policy):
        stage = stage_of(algorithm, **policy)
        if algorithm == "grpo":
            stage = stage.model_copy(
                update={"loss_fn": stage.loss_fn.model_copy(update={"reference_policy_kl_penalty": kl})}
            )
        return need(load(shape, stage)).parts.get("reference")

    assert reference("dpo") == reference("grpo", 0.1) == 4 * shape.parameters
    assert reference("grpo") is reference("sft") is reference("dpo", lora={"dim": 8}) is None


def test_many_completions_at_once_are_a_matter_of_their_keys_and_values(shape):
    stage = stage_of("grpo", rows=256, length=2048, train_micro_batch_size=1, precision="bfloat16", lora={"dim": 8})
    sampling = need(load(shape, stage))
    assert sampling.moment == "sampling"
    assert sampling.parts["KV cache"] == 33 * 2 * shape.key_value_heads * 128 * 2 * 256 * 2048


def test_vllm_takes_its_share_unless_it_sleeps_or_lies_elsewhere(shape):
    def parts(**says):
        stage = stage_of("grpo", rows=8, precision="bfloat16", lora={"dim": 8}, train_micro_batch_size=1)
        generation = stage.policy.generation.model_dump() | {"backend": "vllm"} | says
        policy = stage.policy.model_dump() | {"generation": generation}
        return need(load(shape, stage.model_validate(stage.model_dump() | {"policy": policy}), capacity=80e9)).parts

    assert parts()["vLLM"] == 24e9 and parts(vllm_cfg={"gpu_memory_utilization": 0.5})["vLLM"] == 40e9
    assert 2 * shape.parameters < parts(vllm_cfg={"gpu_memory_utilization": 0.1})["vLLM"] < 2.1 * shape.parameters
    assert "vLLM" not in parts(colocated={"enabled": False})
    asleep = parts(vllm_cfg={"enable_sleep_mode": True})
    assert ("vLLM" in asleep) != ("activations" in asleep)


def test_every_change_that_is_advised_fits_and_the_first_ones_make_no_other_stage(shape):
    stage = stage_of(rows=64, length=4096, precision="bfloat16")
    start = load(shape, stage, ranks=8, capacity=80 * 2**30)
    changes = changes_that_fit(start, start.capacity)
    assert [change.is_anew for change in changes] == sorted(change.is_anew for change in changes)
    assert any(change.is_anew for change in changes) and not changes[0].is_anew
    for change in changes:
        assert need(change.load).total <= start.capacity < need(start).total
        now = stage.model_copy(update={"policy": change.load.policy})
        assert (now.values_with_effect() == stage.values_with_effect()) == (not change.is_anew), str(change)


def test_a_stage_that_cannot_fit_is_told_with_figures_and_one_that_fits_is_not(shape):
    large = load(shape, stage_of(length=2048, precision="bfloat16", lora={"dim": 16}, train_micro_batch_size=1))
    words = why_not("sft", large, Device("cuda", 1, GPU, "a GPU of site one"))
    assert "reckoned to need 3" in words and "weights 16" in words and "a GPU of site one holds 25.8 GB" in words
    assert "activation_checkpointing: true (2" in words and "quantization: nf4" in words
    assert "refuse_over_memory: false" in words
    assert why_not("sft", large, Device("cuda", 1, 2 * GPU, "")) is None
    assert why_not("sft", large, Device("cuda", 1, None, "")) is None
    hopeless = load(shape, stage_of(length=2048), device="cpu")
    assert "take a smaller model" in why_not("sft", hopeless, Device("cpu", 1, 2**30, "this machine"))


def test_what_a_site_says_is_what_a_process_has():
    def on(nodes=1, mem_mb=4000, **says):
        return device_of(Site(name="s", threads=2, **says), Resources(nodes=nodes, mem_mb=mem_mb))

    gpus = on(2, accelerator="cuda", gpu_memory_gb=80, slurm={"gpus_per_node": 8})
    assert (gpus.ranks, gpus.capacity) == (16, 80 * 2**30)
    assert on(accelerator="auto").capacity is None
    assert on(processes=2, slurm={}, mem_mb=8000).capacity == 4e9
    assert on(processes=2, slurm={}, mem_mb=0).capacity is None
    assert on(processes=2).capacity == on().capacity / 2


def test_a_model_of_no_known_kind_is_never_refused(tmp_path, model):
    (tmp_path / "config.json").write_text('{"n_embd": 8}')
    assert shape_of(tmp_path, None) is None and shape_of(tmp_path / "nowhere", None) is None
    assert shape_of(model, None) is not None


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


def test_the_plan_tells_and_the_preflight_refuses_what_cannot_fit_unless_the_site_says_so(results):
    folder, recipe = results
    small = Site(name="small", threads=2, accelerator="cuda", gpu_memory_gb=24)
    text = plan_text(Project(recipe, small, folder))
    assert "memory of a process" in text and "its preflight will refuse sft: a process is reckoned to need" in text
    stage = Stage(recipe, folder, "sft")
    with pytest.raises(UserError, match=r"a GPU of site small \(gpu_memory_gb: 24\) holds 25.8 GB"):
        check_stage(stage, small)
    check_stage(stage, small.model_copy(update={"refuse_over_memory": False}))
    check_stage(stage, small.model_copy(update={"gpu_memory_gb": 640}))
    assert load_of(stage, device_of(small, Resources())).shape.layers == 32


@needs_torch
def test_a_training_out_of_memory_ends_with_what_needs_less_and_where_it_goes_on(results, tmp_path):
    import torch

    from scripts.backends.protocol import TrainingJob
    from scripts.stage.rundir import seal_checkpoint
    from scripts.stage.stop import StopRequest

    folder, recipe = results
    job = TrainingJob.of(Stage(recipe, folder, "sft"), 4, 1, StopRequest())
    (job.run / "saving").mkdir(parents=True)
    seal_checkpoint(job.run / "saving", job.run, 3)

    @telling_out_of_memory
    def train(job: TrainingJob) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(UserError) as error:
        train(job)
    words = str(error.value)
    assert "sft: out of memory: " in words and "can't allocate memory" in words
    assert "was reckoned to need" in words and "goes on from step 3" in words

    @telling_out_of_memory
    def fail(job: TrainingJob) -> None:
        raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError, match="of another kind"):
        fail(job)
