"""The recipes that NeMo-RL trains, what they say of its stages, and the checkouts of its releases where they are."""

import os
from typing import Any

import pytest

from scripts.backends.nemo_rl.command import SETTINGS, kept_checkpoints
from scripts.backends.nemo_rl.loops import SETTINGS_OF_TEACHERS
from scripts.backends.nemo_rl.releases import Release, load_releases
from scripts.backends.nemo_rl.settings import ROUTING, NemoRlSettings
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.yaml_file import leaves, read_yaml
from tests.conftest import ROOT

PRODUCTION = sorted(path.stem for path in (ROOT / "config/recipes").glob("*.yaml") if "\nrelease: " in path.read_text())
GPUS = {"ultra3": 4, "lightning35-rlvr": 4}
"""GPUs of a node by recipe, where not 8."""
TRIED = [name for name, release in load_releases().items() if release.is_tried]
CHECKOUTS, PYTHON = (os.environ.get(f"STAGECOACH_NEMO_RL{name}", "") for name in ("", "_PYTHON"))
needs_checkouts = pytest.mark.skipif(
    not CHECKOUTS, reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts by release"
)
needs_nemo_rl = pytest.mark.skipif(
    not (CHECKOUTS and PYTHON),
    reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts, or STAGECOACH_NEMO_RL_PYTHON no Python for a CPU",
)


def recipe_of(name: str) -> Recipe:
    """Read a shipped recipe."""
    return load_recipe(ROOT / f"config/recipes/{name}.yaml")


def whole_recipe(name: str) -> Recipe:
    """Read a shipped recipe from the first stage on, whatever `start` says."""
    path = ROOT / f"config/recipes/{name}.yaml"
    return load_recipe(path, start=next(iter(read_yaml(path).data["stages"])))


def stages_of(recipe: Recipe) -> dict[str, NemoRlSettings]:
    """Return the stages trained by NeMo-RL, by name."""
    return {name: stage for name, stage in recipe.stages.items() if isinstance(stage, NemoRlSettings)}


def stated(stage: NemoRlSettings, release: Release) -> dict[str, Any]:
    """Return a stage's settings in the recipe, by NeMo-RL's keys."""
    sections = {section: getattr(stage, section) for section in SETTINGS}
    sections["distillation"] = {key: value for key, value in stage.distillation.items() if key not in ROUTING}
    ours = dict(leaves(sections))
    ours |= dict(leaves(stage.add))
    ours |= {"cluster.num_nodes": stage.cluster.num_nodes}
    ours |= {"checkpointing.save_period": stage.checkpointing.save_period}
    ours |= kept_checkpoints(stage.checkpointing)
    if stage.cluster.generation_nodes:
        ours["policy.generation.colocated.resources.num_nodes"] = stage.cluster.generation_nodes
    if stage.cluster.judge_nodes and release.keys.judge_nodes:
        ours[release.keys.judge_nodes] = stage.cluster.judge_nodes
    if stage.cluster.teacher_nodes:
        ours[f"{SETTINGS_OF_TEACHERS}.num_nodes"] = stage.cluster.teacher_nodes
    if stage.max_num_steps is not None:
        ours[f"{stage.loop.section}.max_num_steps"] = stage.max_num_steps
    return ours
