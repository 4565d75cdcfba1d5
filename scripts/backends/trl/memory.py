"""What a process that trains a stage needs of its device's memory, reckoned before anything is loaded.

Weights, gradients and optimizer state are counted (ZeRO, arXiv:1910.02054, section 3), the activations of a layer from
what its operators keep for the backward pass (the way of arXiv:2205.05198, section 4.1, for transformers' unfused
layers), logits by TRL's tiles of them (trl/kernels/chunked_logprob.py). Every row is taken to be as long as it may be.
"""

from dataclasses import dataclass

from scripts.backends.trl.algorithms import Lora, Policy
from scripts.backends.trl.training import TrlTraining
from scripts.model.shape import EXPERT, Shape

TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""The largest tile of logits that TRL computes at once."""
COLOCATED_SHARE = 0.3
"""The share of a GPU that vLLM takes beside a trainer, by TRL's default."""
FIXED = {"cuda": 1_000_000_000, "cpu": 600_000_000}
"""What a process takes before any model: the context of CUDA, its libraries and NCCL; Python with torch on a CPU."""
FRAGMENTED = {"cuda": 0.05, "cpu": 0.25}
"""Memory that the allocator holds but cannot use, as a share of all else; glibc keeps much of what was freed."""
NF4 = 0.5 + 4 / 64
"""Bytes of a parameter in 4 bits, with a float32 scale for every 64 (QLoRA, arXiv:2305.14314)."""


@dataclass(frozen=True)
class Need:
    """Bytes that a process needs at the moment when it needs the most, by what they are for."""

    moment: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """All of it, with what a process takes before any model and what the allocator loses."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Load:
    """What falls to one of `ranks` processes of a stage on a device, `cuda` or `cpu`, that holds `capacity` bytes."""

    shape: Shape
    training: TrlTraining
    policy: Policy
    """Of the stage's settings, which say more than its config: how it is laid over processes."""
    ranks: int
    device: str
    capacity: float = 0.0

    @property
    def share(self) -> int:
        """Rows of an update that fall to it."""
        return max(1, self.training.rows_per_update // self.ranks)

    @property
    def rows(self) -> int:
        """Rows that it takes at once."""
        return min(self.policy.train_micro_batch_size or self.share, self.share)

    @property
    def tokens(self) -> int:
        """Tokens that it takes at once; a pair has two answers."""
        answers = 2 if self.training.algorithm in ("dpo", "mpo") else 1
        return self.rows * answers * self.policy.max_total_sequence_length

    @property
    def is_sharded(self) -> bool:
        """Whether it holds a share of weights, gradients and moments only."""
        return self.policy.dtensor_cfg.enabled and self.ranks > 1

    @property
    def is_in_bfloat16(self) -> bool:
        """Whether it computes in two bytes."""
        return self.policy.precision == "bfloat16"

    @property
    def computed(self) -> int:
        """Bytes of a number that it computes with."""
        return 2 if self.is_in_bfloat16 else 4

    @property
    def has_reference(self) -> bool:
        """Whether a second model is held; a model with adapters is its own reference without them."""
        if self.policy.lora is not None or self.training.algorithm == "sft":
            return False
        return self.training.algorithm != "grpo" or self.training.loss_fn.reference_policy_kl_penalty > 0

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        if self.policy.lora is None:
            return self.shape.parameters
        return sum(self.policy.lora.dim * sum(sides) for sides in adapted(self.shape, self.policy.lora).values())


def adapted(shape: Shape, lora: Lora) -> dict[str, list[int]]:
    """The linear layers that adapters are laid over, as peft chooses them by name."""

    def named(name: str, ends: list[str]) -> bool:
        return any(name == end or name.endswith(f".{end}") for end in ends)

    return {
        name: sides
        for name, sides in shape.linear_layers.items()
        if (not lora.target_modules or named(name, lora.target_modules)) and not named(name, lora.exclude_modules)
    }


def need(load: Load) -> Need:
    """What the process needs at the moment when it needs the most."""
    held = _held(load)
    moments = {"update": _updating(load), "optimizer's step": _stepping(load)}
    if load.training.algorithm == "grpo" and not load.training.samples_by_vllm:
        moments["sampling"] = _sampling(load)
    if load.training.samples_by_vllm and load.policy.generation.vllm_cfg.enable_sleep_mode:
        moments["sampling"] = {"vLLM": held.pop("vLLM")}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: size for name, size in (held | moments[moment]).items() if size}
    parts["allowance"] = FIXED[load.device] + FRAGMENTED[load.device] * sum(parts.values())
    return Need(moment, parts)


def _held(load: Load) -> dict[str, float]:
    """What is there all the time.

    Trained weights and AdamW's moments are float32 whatever is computed in (4 + 8 bytes a parameter; the moments of
    bitsandbytes take 2, those of embeddings stay at 8); what adapters are laid over has the precision computed in.
    """
    policy, shape, trained = load.policy, load.shape, load.trained
    over = load.ranks if load.is_sharded else 1
    if policy.lora is None:
        weights = 4 * shape.parameters / over
    elif policy.lora.quantization is None:
        weights = load.computed * shape.parameters / over + 4 * trained / over
    else:
        in_bits = shape.matrices - shape.of_experts
        weights = (NF4 * in_bits + load.computed * (shape.parameters - in_bits)) / over + 4 * trained / over
    moments = 8.0 * trained
    if policy.optimizer.name == "adamw_8bit":
        moments = 2.0 * trained + (6 * shape.embeddings if policy.lora is None else 0)
    held = {
        "weights": weights,
        "optimizer": moments / over,
        "reference": 4 * shape.parameters / over if load.has_reference else 0,
    }
    if policy.dtensor_cfg.cpu_offload:
        held = dict.fromkeys(held, 0)
    if load.ranks > 1 and not load.is_sharded:
        held["gradient buckets"] = 4 * trained  # DDP's copies of the gradients, which it talks of
    if load.training.samples_by_vllm:
        held["vLLM"] = _vllm(load)
    return held


def _vllm(load: Load) -> float:
    """The share of the GPU that vLLM takes, or the weights and one row's keys and values if that is more.

    Nothing where it is served on other GPUs.
    """
    generation = load.policy.generation
    if not generation.colocated.enabled:
        return 0.0
    share = generation.vllm_cfg.gpu_memory_utilization or COLOCATED_SHARE
    least = (2 * load.shape.parameters + _key_values(load, rows=1)) / generation.vllm_cfg.tensor_parallel_size
    return max(share * load.capacity, least)


def _key_values(load: Load, rows: int) -> float:
    """Keys and values of all tokens of some rows in every layer."""
    shape, length = load.shape, load.policy.max_total_sequence_length
    return 2 * shape.layers * shape.key_value_heads * shape.head_size * load.computed * rows * length


def _updating(load: Load) -> dict[str, float]:
    """What the forward and backward pass of some rows needs.

    Gradients grow while activations shrink, so both are there in full only where gradients of earlier rows wait.
    """
    shape, policy = load.shape, load.policy
    layer, work = load.tokens * layer_bytes(load), load.tokens * work_bytes(load)
    if policy.dtensor_cfg.activation_checkpointing:
        size = 2 if load.is_in_bfloat16 and policy.lora is not None else 4
        kept = load.tokens * shape.layers * shape.hidden * size + layer
    else:
        kept = shape.layers * layer
    gradients = _gradients(load)
    copies = _copies(load)
    begins = {"activations": kept, "logits": _logits(load), "copies": copies}
    ends = {"activations": layer + work, "gradients": gradients, "copies": copies}
    if load.share > load.rows:
        return begins | {"gradients": gradients}
    return max(begins, ends, key=lambda parts: sum(parts.values()))


def _stepping(load: Load) -> dict[str, float]:
    """What an update of the weights needs: on a GPU AdamW takes a temporary number a parameter (torch's foreach)."""
    gradients = _gradients(load)
    many = load.device == "cuda" and load.policy.optimizer.name == "adamw_torch"
    over = load.ranks if load.is_sharded else 1
    return {"gradients": gradients, "optimizer's work": 4 * load.trained / over if many else 0}


def _gradients(load: Load) -> float:
    if load.policy.dtensor_cfg.cpu_offload:
        return 0.0
    return 4 * load.trained / (load.ranks if load.is_sharded else 1)


def _copies(load: Load) -> float:
    """Other forms of the weights: gathered from other processes, in bfloat16 by autocast, experts with their adapters.

    FSDP2 gathers a layer while the next is on its way, and holds the embeddings throughout.
    """
    shape, lora = load.shape, load.policy.lora
    if load.is_sharded:
        return load.computed * (2 * shape.matrices / shape.layers + shape.embeddings)
    if lora is not None:
        adapted_experts = any(EXPERT in name for name in adapted(shape, lora))
        layers = shape.layers if load.policy.dtensor_cfg.activation_checkpointing else 1
        return load.computed * shape.of_experts / layers if adapted_experts else 0.0
    if load.is_in_bfloat16:
        return 2 * (shape.matrices - shape.of_experts) * (2 if load.has_reference else 1)
    return 0.0


def layer_bytes(load: Load) -> float:
    """Bytes that a layer keeps of a token for the backward pass, by what transformers' modules compute.

    A norm keeps its input, the normalised input (if its own weight is trained) and its output; attention queries, keys,
    values and its result; the MLP gate, activation, up and their product.
    Autocast makes a copy in bfloat16 of what each of the linear layers gets.
    """
    shape, lora = load.shape, load.policy.lora
    hidden, queries = shape.hidden, shape.heads * shape.head_size
    key_values = shape.key_value_heads * shape.head_size
    heads = queries + key_values if shape.has_head_norms else 0
    attention, inner = 2 * queries + 2 * key_values, 4 * shape.experts * shape.intermediate
    if shape.experts > 1:
        inner += 2 * shape.experts * hidden  # a token's copy for each expert, and its result
        inner *= 4 // load.computed if lora is None else 1  # which autocast leaves in float32
    norm = 1 if lora else 2
    if load.is_in_bfloat16:
        kept = 4 * (norm * shape.norms * hidden + norm * heads) + 2 * (5 * hidden + attention + inner)
    else:
        kept = 4 * ((norm + 1) * shape.norms * hidden + norm * heads + attention + inner)
    if lora and lora.dropout:
        kept += (load.computed + 1) * (5 * hidden + queries + shape.intermediate)
    if load.policy.attn_implementation == "eager":
        kept += shape.heads * load.policy.max_total_sequence_length * (6 if load.is_in_bfloat16 else 4)
    return kept


def work_bytes(load: Load) -> float:
    """Bytes a token that a layer works in: the gradients of its MLP; of scores, where attention is eager."""
    shape = load.shape
    work = load.computed * (3 * shape.experts * shape.intermediate + 2 * shape.hidden)
    if load.policy.attn_implementation == "eager":
        work += 2 * shape.heads * load.policy.max_total_sequence_length * 4
    return work


def _logits(load: Load) -> float:
    """What the loss needs: a tile of logits, the gradient of the hidden states and of the output matrix.

    torch's own operators, in place of Triton's kernel, make several copies of a tile on a CPU.
    """
    shape = load.shape
    tile = min(load.tokens, TILE_TOKENS) * min(shape.vocabulary, TILE_VOCABULARY)
    columns = min(shape.vocabulary, TILE_VOCABULARY) * shape.hidden
    matrix = shape.vocabulary * shape.hidden
    copies = load.computed + (0 if load.device == "cuda" else 8 * 4)
    size = tile * copies + load.computed * columns + (4 + 2 * load.computed) * load.tokens * shape.hidden
    if load.policy.lora is None:
        size += 4 * matrix
    if load.is_sharded:
        size += load.computed * matrix
    return size


def _sampling(load: Load) -> dict[str, float]:
    """What transformers needs to sample all completions of a process at once.

    Keys and values of every token in every layer, one layer's twice while a token is added; the prompts' way through a
    layer; probabilities of the next token, some copies of them.
    """
    shape, policy = load.shape, load.policy
    length = policy.max_total_sequence_length
    rows = max(1, load.training.samples_per_step // load.ranks)
    prompts = rows * (length - policy.generation.max_new_tokens) * work_bytes(load)
    return {
        "KV cache": _key_values(load, rows) * (1 + 1 / shape.layers),
        "activations": prompts,
        "logits": 4 * 4 * rows * shape.vocabulary,
        "copies": _copies(load),
    }
