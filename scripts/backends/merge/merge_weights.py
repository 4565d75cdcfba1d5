"""Merge exports by mergekit, a tensor at a time, in memory of a shard of the result.

Names, shards and the files beside the weights are the first part's. A tensor is computed in float32 and rounded once to
its type there. mergekit's own loop is not taken: it orders tensors by Python's hashes, which differ from process to
process, and so do the draws of dare and the shards; and it renames what transformers holds otherwise than the files.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from mergekit.merge_methods import merge_state_dicts
from safetensors.torch import save_file

from scripts.backends.merge.merging import Merging, misfit
from scripts.backends.trl.versions import check_versions
from scripts.errors import UserError
from scripts.files import append_json, check_readable, copy_file, sha256_text, temporary_directory
from scripts.model.finite import refuse_not_numbers
from scripts.model.hugging_face import model_files
from scripts.model.loading import read_tensor, shards_of
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder


def merge_exports(stage: Stage, training: TrainingFolder, threads: int) -> Checkpoint:
    """Merge the stage's parts, and seal the result as step 1; UserError where they do not fit together."""
    config, exports, started = stage.config, stage.role_exports, time.monotonic()
    check_versions(config.release)
    torch.set_num_threads(threads)
    parts = [exports[role] for role in config.parts]
    base = [stage.parent_export] if config.merging.has_base else []
    for folder in (*parts, *base):
        check_readable(folder)
    if says := misfit(*parts, *base):
        raise UserError(f"{stage.name}: {says}")
    with temporary_directory(training.path / "saving") as fresh:
        write_merge(parts, [*config.parts.values()], base, config.merging, config.seed, fresh)
        _refuse_not_numbers(stage, parts, base, fresh)
        append_json(training.log, {"step": 1, "seconds": time.monotonic() - started})
        return training.seal(fresh, 1)


def _refuse_not_numbers(stage: Stage, parts: Sequence[Path], base: Sequence[Path], merged: Path) -> None:
    """Raise UserError where the merged weights are no numbers, with the part that brought them if one did."""
    try:
        refuse_not_numbers(merged, f"{stage.name}: merged", "Nothing is published")
    except UserError:
        names = [role.removeprefix("merge.") for role in stage.config.parts]
        named = [*zip(names, parts, strict=True), *(("the base", folder) for folder in base)]
        for name, folder in named:
            refuse_not_numbers(folder, f"{stage.name}: {name} ({folder})", "Merge another model in its place")
        raise


def write_merge(
    parts: Sequence[Path],
    shares: Sequence[float],
    base: Sequence[Path],
    merging: Merging,
    seed: int | None,
    fresh: Path,
) -> None:
    """Write the merge of the parts, by their shares and from a base if any, into an empty folder.

    Draws of dare depend on the seed and the tensor's name alone.
    """
    method = merging.merge_method
    parameters = {"t": shares[1]} if method == "slerp" else {"weight": shares}
    parameters |= {"density": merging.density} if merging.has_base else {}
    reference = 0 if merging.has_base or method == "slerp" else None
    places = [shards_of(folder) for folder in (*base, *parts)]
    first = places[len(base)]
    for path in model_files(parts[0]):
        if path.suffix != ".safetensors":
            copy_file(path, fresh / path.name)
    for shard in sorted({*first.values()}):
        merged = {}
        for name in (name for name, path in first.items() if path == shard):
            tensors = [{name: read_tensor(place[name], name)} for place in places]
            torch.manual_seed(int(sha256_text(f"{seed} {name}")[:15], 16))
            dtype = tensors[len(base)][name].dtype
            found = merge_state_dicts(tensors, method, parameters=parameters, base=reference, dtype=torch.float32)
            merged[name] = found[name].to(dtype)
        save_file(merged, fresh / shard.name, metadata={"format": "pt"})
        print(f"{shard.name}: {len(merged)} tensors merged", flush=True)
