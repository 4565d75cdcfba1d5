"""The devices that are fast in bfloat16."""

from pathlib import Path
from typing import Literal

from scripts.model.hugging_face import config_of


def computes_bfloat16(device: str, described: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether a device is fast in bfloat16: a GPU, or a CPU with AVX-512 or Arm's bf16.

    On other CPUs torch multiplies matrices some 40 times as slowly as in float32 (measured with AVX2).
    """
    if device != "cpu":
        return True
    text = described.read_text(encoding="utf-8") if described.exists() else ""
    words = {line.partition(":")[0].strip(): {*line.split()} for line in text.splitlines()}
    return {"avx512bw", "avx512dq", "avx512vl"} <= words.get("flags", set()) or "bf16" in words.get("Features", ())


def type_to_score(folder: Path, device: str) -> Literal["auto", "float32"]:
    """Return the type to score a model in: the saved type, or float32 on a CPU that is slow in bfloat16.

    A quantised model computes in its saved type alone.
    """
    return "auto" if computes_bfloat16(device) or "quantization_config" in config_of(folder) else "float32"
