"""Stages of every algorithm on a pretrained model, ready for a preflight: exported model, splits and manifests."""

from pathlib import Path
from typing import Any

import yaml

from scripts.recipe.load import load_recipe
from scripts.stage.stage import Stage
from tests.conftest import ROOT
from tests.stages import Stages, note_made

ALGORITHMS = ("sft", "dpo", "mpo", "kto", "reward", "grpo", "distillation")


def write_recipe(path: Path, model: Path | None = None, policy: dict[str, Any] | None = None) -> Path:
    """Write tests/algorithms.yaml without pictures, a stage an algorithm of its name.

    With a `model`, every stage starts from this folder and learns from it; `policy`: more settings of each policy.
    """
    values = yaml.safe_load((ROOT / "tests/algorithms.yaml").read_text())
    del values["model"]["vision"]
    for blend in values["blends"].values():
        blend.pop("pictures", None)
    stages = values["stages"]
    shared = {name: value for name, value in stages["dpo"].items() if name != "dpo"}
    stages["reward"] = shared | {"algorithm": "reward", "reward": {"max_num_steps": 4}}
    stages["grpo"] = stages.pop("text") | {"probe": {"tolerated_share": 0.95}}
    stages["distillation"]["teachers"]["math"] = "grpo"
    for name in ("skipping", "vision"):
        del stages[name]
    if model is not None:
        values["model"] = {"name": str(model)}
        values["models"] = {"teacher": {"name": str(model)}}
        stages["distillation"]["teachers"] = {"math": "teacher", "choice": "teacher"}
        for stage in stages.values():
            stage.pop("parent", None)
            stage["policy"] = stage.get("policy", {}) | {"max_total_sequence_length": 256} | (policy or {})
        if (policy or {}).get("lora"):
            del stages["reward"]
    values["name"] = path.stem
    path.write_text(yaml.safe_dump(values))
    return path


def ready_stages(root: Path, model: Path, policy: dict[str, Any] | None = None) -> dict[str, Stage]:
    """Return the stages of a recipe on a model by algorithm, whose model is exported and whose splits are there."""
    from scripts.train.export import export_pretrained

    recipe = load_recipe(write_recipe(root / "trials.yaml", model, policy))
    results = root / "results"
    Stages(results / "data", root / "trials.yaml")
    for blend in recipe.blends:
        note_made(recipe, results, blend)
    for name, pretrained in recipe.graph.pretrained.items():
        export_pretrained(pretrained, results / name / "hf")
    return {name: Stage(recipe, results, name) for name in recipe.stages}


def break_weight(path: Path, name: str, value: float = float("nan"), to: Path | None = None) -> None:
    """Write a file of weights with one value of a tensor replaced, in its place or to another file."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    weights[name].view(-1)[0] = value
    save_file(weights, to or path, metadata={"format": "pt"})
