"""Weights that are no numbers: NaN and infinite values in the safetensors files of a model or of adapters.

A file is read once, in pieces that stay in the processor's cache, and its values are looked at as bits. That is several
times as fast as hashing the file, and takes the memory of one piece.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError, warn
from scripts.files import in_threads, write_json
from scripts.model.hugging_face import A_ROW_A_TOKEN, weights_in

PIECE = 1 << 18
"""Bytes read at a time."""
SHOWN = 3
NORM = re.compile(r"norm[\w.]*weight$|\bln_\w+\.weight$")
SCALE = re.compile(r"scales?$")


@dataclass(frozen=True)
class _Form:
    """How a type writes what is no number: with all bits of `mask` set.

    `unsigned` is numpy's name of whole numbers of the type's width. Where the type has infinities, those have no other
    bit set but the sign.
    """

    unsigned: str
    mask: int
    has_infinities: bool = True


FORMS = {
    "F64": _Form("<u8", 0x7FF0_0000_0000_0000),
    "F32": _Form("<u4", 0x7F80_0000),
    "F16": _Form("<u2", 0x7C00),
    "BF16": _Form("<u2", 0x7F80),
    "F8_E5M2": _Form("u1", 0x7C),
    "F8_E4M3": _Form("u1", 0x7F, has_infinities=False),
    "F8_E8M0": _Form("u1", 0xFF, has_infinities=False),
}
"""By safetensors' names. Whole numbers, and floats of six and four bits, are always numbers."""
PACKED_SCALE = FORMS["F8_E8M0"]
"""The scales of mxfp4, which are stored as whole numbers of eight bits."""


@dataclass
class Tensor:
    """What was found in a tensor: values that are NaN, values that are infinite, and whether all are zero."""

    name: str
    file: str
    dtype: str
    shape: list[int]
    nans: int = 0
    infinities: int = 0
    is_zero: bool = False

    @property
    def is_broken(self) -> bool:
        """Whether a value is no number."""
        return self.nans + self.infinities > 0

    def __str__(self) -> str:
        """Describe the tensor with the count of values that are no numbers."""
        size = " x ".join(map(str, self.shape)) or "one value"
        counts = [f"{self.nans} NaN"] if self.nans else []
        counts += [f"{self.infinities} infinite"] if self.infinities else []
        return f"{self.name} ({self.dtype}, {size}, in {self.file}) has {' and '.join(counts)}"


@dataclass
class Weights:
    """What was found in the weights of a folder: its bytes of weights, and the tensors that are not as they should.

    `unread` are files that are no whole safetensors files, which no library loads.
    """

    size: int = 0
    unread: list[str] = field(default_factory=list)
    broken: list[Tensor] = field(default_factory=list)
    zero: list[Tensor] = field(default_factory=list)
    """Norms and embeddings that are all zero."""


def look_at(folder: Path) -> Weights:
    """Read all weights of a folder.

    Whether files are whole is known by then, from their hashes or from `scripts.model.hugging_face.check_model`.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    has_packed_scales = _has_packed_scales(folder)
    found = Weights()
    norms: list[Tensor] = []

    def read(name: str) -> list[Tensor] | None:
        try:
            return [*_tensors_in(folder / name, has_packed_scales)]
        except UserError:
            return None

    for name, tensors in zip(names, in_threads(read, names), strict=True):
        if tensors is None:
            found.unread.append(name)
            continue
        found.broken += [tensor for tensor in tensors if tensor.is_broken]
        found.zero += [tensor for tensor in tensors if tensor.is_zero and tensor.name.endswith(A_ROW_A_TOKEN)]
        norms += [tensor for tensor in tensors if NORM.search(tensor.name)]
    found.size = sum((folder / name).stat().st_size for name in names)
    zero_norms = [tensor for tensor in norms if tensor.is_zero]
    # some families scale by 1 + weight, so that all their norms begin as zeros
    if len(zero_norms) < len(norms):
        found.zero += zero_norms
    return found


def refuse_not_numbers(folder: Path, whose: str, remedy: str) -> Weights:
    """Raise UserError where a weight in a folder is NaN or infinite; warn of norms and embeddings of zeros.

    `whose` begins the message, and `remedy` ends it. Return what was found.
    """
    found = look_at(folder)
    if found.broken:
        first = "; ".join(map(str, found.broken[:SHOWN]))
        more = len(found.broken) - SHOWN
        others = f"; and {more} tensors more" if more > 0 else ""
        raise UserError(f"{whose}: weights are no numbers: {first}{others}. {remedy}")
    if found.zero:
        names = ", ".join(tensor.name for tensor in found.zero[:SHOWN])
        warn(f"{whose}: all zero, as in a file that was not written to its end: {names} ({len(found.zero)} in all)")
    return found


def refuse_export(export: Path, whose: str, remedy: str, folder: Path | None = None) -> None:
    """Raise as `refuse_not_numbers` for an export, named by its content, unless a note beside it says it was looked at.

    The note is written once the weights were found to be numbers, where the folder of exports can be written. The
    export may still be in another `folder`.
    """
    note = export.with_name(f"{export.name}.finite.json")
    if note.is_file():
        return
    found = refuse_not_numbers(folder or export, whose, remedy)
    if not found.unread and os.access(note.parent, os.W_OK):
        write_json(note, {"bytes": found.size})


def _has_packed_scales(folder: Path) -> bool:
    """Whether a model's config says that its weights are in mxfp4."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError):
        return False
    return "mxfp4" in str(config.get("quantization_config", "")).lower()


def _tensors_in(path: Path, has_packed_scales: bool) -> Iterator[Tensor]:
    """Yield the tensors of a file whose values can be no numbers, or that should not be zero."""
    start, tensors = weights_in(path)
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            form = FORMS.get(tensor.dtype)
            if tensor.dtype == "U8" and has_packed_scales and SCALE.search(name):
                form = PACKED_SCALE
            if form is None:
                continue
            first, last = tensor.data_offsets
            file.seek(start + first)
            found = Tensor(name, path.name, tensor.dtype, list(tensor.shape))
            is_watched = NORM.search(name) is not None or name.endswith(A_ROW_A_TOKEN)
            _count(file, last - first, form, found, is_watched)
            yield found


def _count(file: Any, size: int, form: _Form, found: Tensor, is_watched: bool) -> None:
    """Count the values of a tensor's bytes that are no numbers; where it `is_watched`, note whether all are zero."""
    import numpy as np  # noqa: PLC0415 - each call of Snakemake reads this module

    buffer = np.empty(min(PIECE, size), np.uint8)
    masked = np.empty(len(buffer) // np.dtype(form.unsigned).itemsize, form.unsigned)
    mask = masked.dtype.type(form.mask)
    only_zeros = size > 0
    for begin in range(0, size, PIECE):
        piece = buffer[: min(PIECE, size - begin)]
        file.readinto(piece)
        values = piece.view(form.unsigned)
        under_mask = np.bitwise_and(values, mask, out=masked[: len(values)])
        if under_mask.max() == mask:
            _add(values[under_mask == mask], mask, form, found)
        if is_watched and only_zeros:
            only_zeros = not piece.any()
    found.is_zero = is_watched and only_zeros


def _add(broken: Any, mask: Any, form: _Form, found: Tensor) -> None:
    """Add values that are no numbers to a tensor's counts."""
    infinities = 0
    if form.has_infinities:
        without_sign = broken & broken.dtype.type((1 << 8 * broken.itemsize - 1) - 1)
        infinities = int((without_sign == mask).sum())
    found.infinities += infinities
    found.nans += len(broken) - infinities
