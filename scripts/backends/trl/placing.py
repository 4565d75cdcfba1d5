"""Place a stage: device, processes, equal shares of a step, and memory, estimated before anything is loaded."""

import math
import os
import sys
from pathlib import Path

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithm import Policy, TrlSettings
from scripts.errors import UserError
from scripts.files import amount
from scripts.model.bfloat16 import computes_bfloat16
from scripts.model.hugging_face import tensors_of
from scripts.model.lengths import LengthsOf
from scripts.model.shape import Shape
from scripts.recipe.resolve import own_environments
from scripts.recipe.site import Site
from scripts.rows.measures import measured
from scripts.rows.parallel import default_workers
from scripts.stage.stage import Stage


def devices_of(site: Site) -> tuple[str, int]:
    """Return `cuda` or `cpu`, and the processes on this node: one a GPU, on CPUs one unless the site sets more.

    UserError where the site asks for missing GPUs.
    """
    found = 0
    if site.accelerator != "cpu":
        import torch  # noqa: PLC0415 - seconds, and only where GPUs are looked for

        found = torch.cuda.device_count()
        if found == 0 and site.accelerator == "cuda":
            raise UserError(f"site {site.name}: accelerator is cuda, but torch {torch.__version__} sees no GPU here")
    if found == 0:
        return "cpu", site.processes or 1
    wanted = site.processes_on_node if site.slurm else site.processes or found
    if wanted > found:
        raise UserError(f"site {site.name}: {wanted} processes need as many GPUs, but torch sees {found} here")
    return "cuda", wanted


def ranks_on(site: Site, stage: Stage) -> tuple[int, int]:
    """Return the nodes and the processes that train a stage on a site."""
    nodes = site.resources_of(stage.name, stage.settings).nodes
    return nodes, nodes * site.processes_on_node


def check_shares(stage: str, config: TrlSettings, settings: TrlSettings, nodes: int, ranks: int) -> None:
    """Raise UserError where processes cannot share a step of the resolved config evenly.

    Every process trains equally many rows; the completions of a prompt, rewarded together, stay together.
    """
    each = "nodes" if ranks == nodes else "processes"
    setting = "resources.nodes" if ranks == nodes else "resources.nodes or the site's processes"
    for key, value in config.shared_by_processes.items():
        if value is not None and value % ranks:
            fits = ", ".join(str(count) for count in range(1, value + 1) if value % count == 0)
            raise UserError(
                f"{stage}: {key} is {value}, which {ranks} {each} cannot share evenly; set {setting} for one of "
                f"{fits}, or {key} to a multiple of {ranks} (a different stage, trained anew)"
            )
    share, micro = config.rows_per_update // ranks, settings.policy.train_micro_batch_size
    if micro is not None and share % min(micro, share):
        raise UserError(
            f"{stage}: policy.train_micro_batch_size is {micro}, but {share} rows of an update fall to each of "
            f"{ranks} {each}, not a multiple of {micro}"
        )


NF4 = 0.5 + 4 / 64  # bytes of a weight: 4 bits, and a float32 scale for every 64 (QLoRA, arXiv:2305.14314)
FIXED = 1e9  # bytes before any model is loaded: Python and torch, CUDA's context
TILE_TOKENS, TILE_WORDS = 4096, 32768  # TRL's tile of logits (trl.kernels.chunked_logprob)
TILES = 8  # copies of a tile that torch's operators hold in the backward pass where Triton's kernel does not run
ERROR = 1.3  # of the estimate, but for weights and moments (benchmarks/memory.md)
LESS = (
    "lower policy.train_micro_batch_size, set policy.dtensor_cfg.activation_checkpointing, share the model among more "
    "processes (policy.dtensor_cfg.enabled), or train adapters (policy.lora)"
)
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
    "less than desired CPU memory utilization",
)


def estimate(
    shape: Shape, training: TrlSettings, tokens: int, ranks: int = 1, capacity: float | None = None
) -> dict[str, float]:
    """Return the bytes of one of `ranks` processes at its peak, by purpose, for sequences of at most so many `tokens`.

    `capacity` is a GPU's bytes, of which vLLM takes a share; None: a CPU. Weights and AdamW's state are counted after
    ZeRO (arXiv:1910.02054, 3.1), activations after arXiv:2205.05198, 4.1; gradients may take the activations' place.
    """
    policy = training.policy
    lora, placing, width = policy.lora, policy.dtensor_cfg, _width(policy, "cpu" if capacity is None else "cuda")
    trained = shape.parameters if lora is None else lora.dim * sum(map(sum, shape.linear_layers))
    whole = 6 if width == 2 else 4  # autocast keeps copies in bfloat16
    frozen = whole if lora is None else NF4 if lora.quantization else width
    reference = 4 if training.has_reference and lora is None else 0
    held = {
        "weights": (frozen + reference) * shape.parameters + (4 * trained if lora else 0),
        "moments": 8 * trained,
        "gradients": 4 * trained,
    }
    held = {name: size / (ranks if placing.enabled else 1) for name, size in held.items()}
    share = max(1, training.rows_per_update // ranks)
    micro = min(policy.train_micro_batch_size or share, share)
    at_once = micro * training.sequences_per_row * tokens
    layer = width * (12 * shape.hidden + 4 * shape.experts * shape.intermediate)
    layers = shape.layers * (4 * shape.hidden if placing.activation_checkpointing else layer)
    activations = at_once * (layers + layer)
    logits = min(at_once, TILE_TOKENS) * min(shape.vocabulary, TILE_WORDS) * (4 * TILES if capacity is None else width)
    parts = held | {"activations": activations, "logits": logits, "fixed": FIXED}
    if micro == share and ranks == 1:
        parts["gradients"] = max(0, held["gradients"] - activations - logits)
    generation = getattr(policy, "generation", None)
    if generation and not training.samples_by_vllm:
        cache = 2 * shape.layers * shape.key_value_heads * shape.head_size * width * tokens
        parts["sampling"] = max(0, cache * training.samples_per_step / ranks - activations - logits)
    elif generation and not generation.vllm_cfg.enable_sleep_mode:
        parts["vLLM"] = (capacity or 0) * (generation.vllm_cfg.gpu_memory_utilization or 0.3)
    return parts


def model_at_hand(stage: Stage) -> tuple[Path | None, Shape | None]:
    """Return the newest export in a stage's line, else the recipe's folder, with the shape that all of them have."""
    export = stage.parent_export
    folder = export if export and (export / "config.json").is_file() else getattr(stage.recipe.model, "folder", None)
    for parent in stage.parents:
        if folder != export:
            return model_at_hand(parent)
    try:
        return folder, Shape.of_folder(folder) if folder else None
    except (UserError, KeyError, OSError):
        return folder, None


def longest_row_of(stage: Stage, tokenizer: Path) -> LengthsOf:
    """Return the measure of a stage's longest row by a tokenizer; no row is too long for it."""
    kind = stage.recipe.blends[stage.settings.blend].kind
    return LengthsOf.by(kind, str(tokenizer), sys.maxsize, stage.config.chat_template)


def counts_rows(stage: Stage, model: Path) -> bool:
    """Whether a stage's longest sequence can be told by its rows, which are there beside a tokenizer."""
    blend = stage.recipe.blends[stage.settings.blend]
    # pictures take tokens of their own, and environments' tools add to a prompt
    is_longer = blend.has_pictures or own_environments(stage.recipe, stage.name)
    return not is_longer and (model / "tokenizer.json").is_file() and stage.train_split.is_file()


def longest_sequence(stage: Stage, model: Path) -> tuple[int, bool]:
    """Return the tokens of a stage's longest sequence, and whether they come from its rows: else they are the limit."""
    config, generation = stage.config, getattr(stage.config.policy, "generation", None)
    if not counts_rows(stage, model):
        return config.max_length, False
    lengths = measured(stage.train_split, longest_row_of(stage, model / "tokenizer.json"), default_workers())
    longest = min(lengths.longest, config.longest_row)
    return min(longest + (generation.max_new_tokens if generation else 0), config.max_length), True


def sentence(stage: Stage, site: Site) -> tuple[str, bool | None]:
    """Say what a process of the stage needs and has on the site, and whether the stage fits (None: perhaps)."""
    model, shape = model_at_hand(stage)
    if model is None or shape is None:
        return "", True
    (capacity, where), (tokens, are_counted) = _capacity(stage, site), longest_sequence(stage, model)
    placed = ranks_on(site, stage)[1], None if site.accelerator == "cpu" else capacity or 0
    frozen = _frozen(stage, shape, site)
    parts = estimate(shape, stage.settings, tokens, *placed) | frozen
    needed, told = sum(parts.values()), ", ".join(f"{name} {amount(size)}" for name, size in parts.items() if size)
    of = "tokens of its longest row" if are_counted else "tokens, the limit of a row"
    says = f"{stage.name}: a process needs about {amount(needed)} ({told}) at {tokens} {of}"
    if capacity is None or needed <= capacity:
        return says + (f" of the {amount(capacity)} of {where}" if capacity else ""), True
    least = parts if are_counted else estimate(shape, stage.settings, 1, *placed) | frozen
    exact = least["weights"] + least["moments"]
    is_hopeless = exact + (sum(least.values()) - exact) / ERROR > capacity
    return f"{says}, but {where} has {amount(capacity)}; {LESS} (docs/memory.md)", False if is_hopeless else None


def _frozen(stage: Stage, shape: Shape, site: Site) -> dict[str, float]:
    """Return the bytes of other models in a process's memory, whole in every process: a teacher, or a reward model.

    A teacher that is not there yet is taken for a `shape`, a reward model for nothing.
    """
    there = [folder for folder in stage.role_exports.values() if (folder / "config.json").is_file()]
    counts = [sum(math.prod(widths) for _, widths in tensors_of(folder).values()) for folder in there]
    width, on_gpu = _width(stage.config.policy, site.accelerator), site.accelerator != "cpu"
    return stage.config.frozen_bytes(counts, shape.parameters, width, on_gpu)


def _width(policy: Policy, device: str) -> int:
    """Return the bytes of a number in a policy's computation."""
    return 2 if policy.precision == "bfloat16" and computes_bfloat16(device) else 4


def _capacity(stage: Stage, site: Site) -> tuple[float | None, str]:
    """Return the bytes of a process on the site (None: unknown), with words for their place."""
    if site.accelerator != "cpu":
        stated = site.gpu_memory_gb
        return (stated * 2**30, f"a GPU of site {site.name} (gpu_memory_gb)") if stated else (None, "")
    asked = site.resources_of(stage.name, stage.settings).mem_mb * 1e6 if site.slurm else 0
    if site.slurm and not asked:
        return None, ""
    where = "the job (resources.mem_mb)" if asked else "this machine"
    return (asked or memory_of_machine()) / site.processes_on_node, where


def memory_of_machine() -> float:
    """Return the bytes of memory of this machine or container."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine if allowed == "max" else min(machine, float(allowed))


def out_of_memory(error: Exception, job: TrainingJob) -> str | None:
    """Tell the remedies and the step to resume from, for an error of lacking memory; None for another error."""
    kinds = {kind.__name__ for kind in type(error).__mro__} & {"OutOfMemoryError", "MemoryError"}
    if not kinds and not any(words in str(error) for words in OUT_OF_MEMORY):
        return None
    step = job.training.newest_step
    goes_on = f"resumes from step {step}" if step else "starts again, since no checkpoint was saved yet"
    first = str(error).strip().split("\n", maxsplit=1)[0]
    return f"{job.stage}: out of memory: {first}; {LESS}. The stage {goes_on}"
