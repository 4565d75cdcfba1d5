"""Whether a stage fits into its device's memory, and the smallest changes that would make it fit."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithms import Lora
from scripts.backends.trl.memory import Load, Need, need
from scripts.errors import UserError
from scripts.files import amount
from scripts.model.shape import Shape
from scripts.recipe.model import RandomModel
from scripts.recipe.site import Site
from scripts.recipe.stage import Resources
from scripts.stage.rundir import newest_step
from scripts.stage.stage import Stage

MARGIN = 0.9
"""After a training has run out of memory: the share of what it had, or was reckoned to need, that others may need."""
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
    "less than desired CPU memory utilization",
)
PROCESSES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Change:
    """Other settings with which a stage fits; `is_anew`: they make it another stage."""

    says: tuple[str, ...]
    load: Load
    is_anew: bool = False

    def and_so(self, says: str, **policy: Any) -> "Change":
        """This change and one more of the policy."""
        return replace(
            self,
            says=(*self.says, says),
            load=replace(self.load, policy=self.load.policy.model_copy(update=policy)),
        )

    def with_checkpointing(self) -> "Change":
        """This change with activations computed again."""
        placing = self.load.policy.dtensor_cfg
        if placing.activation_checkpointing:
            return self
        placed = placing.model_copy(update={"activation_checkpointing": True})
        return self.and_so("policy.dtensor_cfg.activation_checkpointing: true", dtensor_cfg=placed)

    def with_fewer_rows(self, limit: float) -> "Change | None":
        """This change with the most rows at once that fit; None: not even one row does."""
        for rows in range(self.load.rows, 0, -1):
            if self.load.share % rows == 0:
                fewer = self.and_so(f"policy.train_micro_batch_size: {rows}", train_micro_batch_size=rows)
                if need(fewer.load).total <= limit:
                    return fewer if rows < self.load.rows else self
        return None

    def fitting(self, limit: float) -> "Iterator[Change]":
        """This change, with fewer rows at once or checkpointing where it fits no other way, and else with both."""
        if self.says and need(self.load).total <= limit:
            yield self
            return
        fewer, again = self.with_fewer_rows(limit), self.with_checkpointing()
        if fewer is not None:
            yield fewer
        if again is not self and need(again.load).total <= limit:
            yield again
        elif fewer is None and (both := again.with_fewer_rows(limit)):
            yield both

    def __str__(self) -> str:
        """One line for people."""
        return f"{', '.join(self.says)} ({amount(need(self.load).total)})"


def changes_that_fit(load: Load, limit: float) -> list[Change]:
    """The smallest changes that make a process need no more than `limit`; those that change no weight come first."""
    placed = list(Change((), load).fitting(limit))
    shared = (change for start in _shared_out(load) for change in start.fitting(limit))
    anew = [next(start.fitting(limit), None) for start in _trained_anew(load)]
    return [*placed, *islice(shared, 1), *filter(None, anew)]


def _shared_out(load: Load) -> Iterator[Change]:
    """The model shared out among GPUs: among as many processes, then among more, at last with its shares offloaded."""
    if load.device != "cuda":
        return
    for offload in (False, True):
        placing = load.policy.dtensor_cfg.model_copy(update={"enabled": True, "cpu_offload": offload})
        for ranks in (load.ranks, *(count for count in PROCESSES if count > load.ranks)):
            is_as_it_is = placing == load.policy.dtensor_cfg and ranks == load.ranks
            if ranks == 1 or load.training.rows_per_update % ranks or is_as_it_is:
                continue
            says = (f"{ranks} processes in all",) if ranks > load.ranks else ()
            says += () if load.is_sharded else ("policy.dtensor_cfg.enabled: true",)
            says += ("policy.dtensor_cfg.cpu_offload: true",) if offload else ()
            policy = load.policy.model_copy(update={"dtensor_cfg": placing})
            yield Change(says, replace(load, policy=policy, ranks=ranks))


def _trained_anew(load: Load) -> Iterator[Change]:
    """Settings that change what is trained, from the least to the most."""
    stage, policy = Change((), load, is_anew=True), load.policy
    if not load.is_in_bfloat16:
        half = stage.and_so("policy.precision: bfloat16", precision="bfloat16")
        yield half
    else:
        half = stage
    if load.device == "cuda" and policy.lora is None and policy.optimizer.name != "adamw_8bit":
        small = policy.optimizer.model_copy(update={"name": "adamw_8bit"})
        yield half.and_so("policy.optimizer.name: adamw_8bit", optimizer=small)
    lora = policy.lora or Lora()
    if policy.lora is None:
        yield half.and_so(f"policy.lora: {{dim: {lora.dim}, alpha: {lora.alpha}}}", lora=lora)
    if load.device == "cuda" and lora.quantization is None:
        in_bits = lora.model_copy(update={"quantization": "nf4"})
        yield half.and_so(f"policy.lora: {{dim: {lora.dim}, alpha: {lora.alpha}, quantization: nf4}}", lora=in_bits)


@dataclass(frozen=True)
class Device:
    """What a process of a stage trains on: `capacity` bytes (None: nobody knows) of `what`, shared with no other."""

    kind: str
    ranks: int
    capacity: float | None
    what: str


def device_of(site: Site, resources: Resources, seen: tuple[str, int] | None = None) -> Device:
    """What a process trains on at a site; `seen`: kind and processes of this node, where it trains here and now.

    Memory of a GPU is what the site states, or else what torch sees; that of a CPU what the job asks for, or else this
    machine's.
    """
    stated, slurm = site.gpu_memory_gb, site.slurm
    kind = seen[0] if seen else "cpu" if site.accelerator == "cpu" else "cuda"
    ranks = resources.nodes * (seen[1] if seen else site.processes_on_node)
    if kind == "cuda":
        capacity = stated * 2**30 if stated else _memory_of_gpu() if seen else None
        return Device(
            kind, ranks, capacity, f"a GPU of site {site.name}{f' (gpu_memory_gb: {stated:g})' if stated else ''}"
        )
    each = ranks // resources.nodes
    what = "the job (resources.mem_mb)" if slurm else "this machine"
    asked = resources.mem_mb * 1e6 if slurm else 0
    whole = asked or (None if slurm and not seen else memory_of_machine())
    return Device(kind, ranks, whole and whole / each, what + (f" for each of {each} processes" if each > 1 else ""))


def memory_of_machine() -> float:
    """Bytes that processes of this machine may use together."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), float(allowed) if allowed != "max" else float("inf")
    )


def _memory_of_gpu() -> float:
    import torch  # noqa: PLC0415 - only where a GPU trains

    return torch.cuda.get_device_properties(0).total_memory


def shape_of(folder: Path | None, model: RandomModel | None) -> Shape | None:
    """The shape of a fresh model or an export; None where that is not there, or of no known kind."""
    try:
        return Shape.of_random(model) if model is not None else Shape.of_folder(folder) if folder is not None else None
    except (UserError, KeyError, OSError):
        return None


def load_of(stage: Stage, device: Device) -> Load | None:
    """What falls to a process of a stage; None where its model is not there yet, or of no known kind."""
    model = stage.recipe.model
    shape = shape_of(None, model) if isinstance(model, RandomModel) else shape_of(_model_of(stage), None)
    return shape and Load(shape, stage.config, stage.settings.policy, device.ranks, device.kind, device.capacity or 0)


def _model_of(stage: Stage) -> Path | None:
    """The model of the nearest stage of the chain whose export is there, or the recipe's own: they have one shape."""
    at: Stage | None = stage
    while at is not None:
        try:
            if at.parent_export is not None and (at.parent_export / "config.json").is_file():
                return at.parent_export
        except UserError:  # a damaged record, of which others tell
            pass
        at = at.parent
    return getattr(stage.recipe.model, "folder", None)


def why_not(name: str, load: Load, device: Device) -> str | None:
    """Why a stage cannot fit, with figures and what would make it fit; None: it fits, or nobody knows."""
    needed = need(load)
    if device.capacity is None or needed.total <= device.capacity:
        return None
    return (
        f"{name}: a process is reckoned to need {amount(needed.total)} ({parts_text(needed)}), but {device.what} holds "
        f"{amount(device.capacity)}{_advice(load, device.capacity)}\n"
        f"  It is an estimate (docs/memory.md); who knows better sets the site's refuse_over_memory: false"
    )


def parts_text(needed: Need) -> str:
    """The parts of what is needed, the greatest first."""
    parts = sorted(needed.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {amount(size)}" for name, size in parts) + f", at its {needed.moment}"


def _advice(load: Load, limit: float) -> str:
    changes = changes_that_fit(load, limit)
    if not changes:
        return "; no change of its settings that is known here makes it fit: take a smaller model or larger GPUs"
    placed = [f"\n    {change}" for change in changes if not change.is_anew]
    anew = [f"\n    {change}" for change in changes if change.is_anew]
    words = "\n  These fit and change no weight but for rounding:" + "".join(placed) if placed else ""
    return words + ("\n  These fit and make it another stage, trained anew:" + "".join(anew) if anew else "")


def check_fits(job: TrainingJob, site: Site) -> None:
    """UserError where a training that is about to start cannot fit; printed where the site refuses nothing."""
    device = device_of(site, site.resources_of(job.stage, job.settings), (job.accelerator, job.processes))
    load = _load_of_job(job, device)
    words = why_not(job.stage, load, device) if load else None
    if words and site.refuse_over_memory:
        raise UserError(words)
    if words:
        print(f"warning: {words}", flush=True)


def _load_of_job(job: TrainingJob, device: Device) -> Load | None:
    shape = shape_of(job.parent_model, job.config.model)
    return shape and Load(shape, job.config, job.settings.policy, job.ranks, device.kind, device.capacity or 0)


def telling_out_of_memory(train: Callable[[TrainingJob], None]) -> Callable[[TrainingJob], None]:
    """A training that, where memory runs out, ends by naming what needs less and the step that it resumes from."""

    @wraps(train)
    def trains(job: TrainingJob) -> None:
        try:
            train(job)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            raise UserError(_told(job, error)) from error

    return trains


def _is_out_of_memory(error: Exception) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"OutOfMemoryError", "MemoryError"}) or any(words in str(error) for words in OUT_OF_MEMORY)


def _told(job: TrainingJob, error: Exception) -> str:
    capacity = _memory_of_gpu() if job.accelerator == "cuda" else memory_of_machine() / job.processes
    load = _load_of_job(job, Device(job.accelerator, job.ranks, capacity, ""))
    words = f"{job.stage}: out of memory: {str(error).strip().splitlines()[0]}"
    if load is not None:
        needed = need(load)
        words += (
            f"\n  A process was reckoned to need {amount(needed.total)} ({parts_text(needed)}) of {amount(capacity)}"
        )
        words += _advice(load, MARGIN * min(capacity, needed.total))
    step = newest_step(job.run)
    goes_on = f"goes on from step {step}" if step else "starts again, since no checkpoint was saved yet"
    return f"{words}\n  The same stage {goes_on}, also with settings that change no weight"
