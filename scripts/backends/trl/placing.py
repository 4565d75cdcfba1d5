"""Place a stage: device, processes, equal shares of a step, and memory, estimated before anything is loaded."""

import os
from pathlib import Path

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithm import TrlConfig, TrlSettings, TrlTraining
from scripts.backends.trl.policy import Policy
from scripts.errors import UserError
from scripts.files import amount
from scripts.model.shape import Shape
from scripts.recipe.site import Site
from scripts.stage.rundir import newest_step
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


def check_shares(stage: str, config: TrlConfig, settings: TrlSettings, nodes: int, ranks: int) -> None:
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
FIXED = 1e9  # bytes before any model is loaded: Python and torch, CUDA's context, a tile of logits
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


def estimate(shape: Shape, training: TrlTraining, policy: Policy, ranks: int, capacity: float = 0) -> dict[str, float]:
    """Return the bytes of one of `ranks` processes, by purpose; vLLM takes a share of a GPU's `capacity`.

    Weights and AdamW's state are counted after ZeRO (arXiv:1910.02054, 3.1), activations after arXiv:2205.05198,
    4.1.
    """
    lora, placing, width = policy.lora, policy.dtensor_cfg, 2 if policy.precision == "bfloat16" else 4
    trained = shape.parameters if lora is None else lora.dim * sum(map(sum, shape.linear_layers))
    frozen = 4 if lora is None else NF4 if lora.quantization else width
    reference = 4 if training.has_reference and lora is None else 0
    held = {
        "weights": (frozen + reference) * shape.parameters + (4 * trained if lora else 0),
        "gradients and moments": 12 * trained,
    }
    held = {name: size / (ranks if placing.enabled else 1) for name, size in held.items()}
    share = max(1, training.rows_per_update // ranks)
    rows = min(policy.train_micro_batch_size or share, share) * training.sequences_per_row
    layer = width * (12 * shape.hidden + 4 * shape.experts * shape.intermediate)
    layers = shape.layers * (4 * shape.hidden if placing.activation_checkpointing else layer)
    activations = rows * training.max_length * (layers + layer)
    generation = getattr(policy, "generation", None)
    if generation and not training.samples_by_vllm:
        cache = 2 * shape.layers * shape.key_value_heads * shape.head_size * width * training.max_length
        activations = max(activations, cache * training.samples_per_step / ranks)
    parts = held | {"activations": activations, "fixed": FIXED}
    if training.samples_by_vllm and not generation.vllm_cfg.enable_sleep_mode:
        parts["vLLM"] = capacity * (generation.vllm_cfg.gpu_memory_utilization or 0.3)
    return parts


def sentence(stage: Stage, site: Site) -> tuple[str, bool]:
    """Say the memory that a process of the stage needs and has on the site; and whether the stage fits."""
    folder, descendant = getattr(stage.recipe.model, "folder", None), stage
    while descendant is not None:
        export = descendant.parent_export
        if export is not None and (export / "config.json").is_file():
            folder = export
            break
        descendant = descendant.parent
    try:
        shape = Shape.of_folder(folder) if folder else None
    except (UserError, KeyError, OSError):
        shape = None
    if shape is None:
        return "", True
    capacity, where = _capacity(stage, site)
    parts = estimate(shape, stage.config, stage.settings.policy, ranks_on(site, stage)[1], capacity or 0)
    needed, told = sum(parts.values()), ", ".join(f"{name} {amount(size)}" for name, size in parts.items())
    says = f"{stage.name}: a process needs about {amount(needed)} ({told})"
    if capacity is None or needed <= capacity:
        return says + (f" of the {amount(capacity)} of {where}" if capacity else ""), True
    return f"{says}, but {where} has {amount(capacity)}; {LESS} (docs/memory.md)", False


def _capacity(stage: Stage, site: Site) -> tuple[float | None, str]:
    """Return the bytes of a process on the site (None: unknown), with words for their place."""
    if site.accelerator != "cpu":
        stated = site.gpu_memory_gb
        return (stated * 2**30, f"a GPU of site {site.name} (gpu_memory_gb)") if stated else (None, "")
    asked = site.resources_of(stage.name, stage.settings).mem_mb * 1e6 if site.slurm else 0
    if site.slurm and not asked:
        return None, ""
    return (
        asked or memory_of_machine()
    ) / site.processes_on_node, "the job (resources.mem_mb)" if asked else "this machine"


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
    step = newest_step(job.run)
    goes_on = f"resumes from step {step}" if step else "starts again, since no checkpoint was saved yet"
    first = str(error).strip().split("\n", maxsplit=1)[0]
    return f"{job.stage}: out of memory: {first}; {LESS}. The stage {goes_on}"
