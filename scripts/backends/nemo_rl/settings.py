"""Settings of backend `nemo_rl`: the stages and their nodes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from scripts.backends.nemo_rl.releases import load_releases, release_of
from scripts.backends.nemo_rl.training import NemoRlConfig, NemoRlTraining
from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.recipe.model import PretrainedModel
from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.strict import Strict, invalid, misnamed, nearest

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe


class NemoRlCluster(Strict):
    """How many nodes NeMo-RL gets, in NeMo-RL's words; without effect on weights."""

    num_nodes: PositiveInt = Field(description="cluster.num_nodes of its config.")
    judge_nodes: NonNegativeInt = 0
    """Nodes of Gym's judge models (of num_nodes or besides, by release)."""
    generation_nodes: NonNegativeInt = 0
    """Of num_nodes, those that only generate (asynchronous training); 0: all do both."""


class NemoRlSettings(StageSettings, NemoRlTraining):
    """A stage that NeMo-RL trains."""

    gone: ClassVar = {
        "pretrained_checkpoint": "leave it out; the stage starts from its parent's export in Hugging Face's format"
    }

    config_model = NemoRlConfig
    WITHOUT_EFFECT = StageSettings.WITHOUT_EFFECT | {"cluster", "image", "launcher", "logger"}
    default_seed = None
    is_converted = True
    is_rewarded_here = False
    site_sets_nodes = False

    image: str = Field("train", description="The container, by its name in the release or the site.")
    cluster: NemoRlCluster
    logger: dict[str, Any] = Field({})
    launcher: str | None = None
    """A launcher of upstream's by its name in the release: the driver gets its variables."""

    def release_in(self, recipe: "Recipe") -> dict[str, str]:
        """Return name and commit of the release."""
        return {"name": recipe.release, "revision": release_of(recipe.release).revision}

    def values_with_effect(self) -> dict[str, Any]:
        """Return the settings with effect on weights, with the hash of a chat template in a file."""
        values = super().values_with_effect() | {"mtp": False}
        if self.algorithm != "sft":
            del values["sft"]
        if self.chat_template and self.chat_template.endswith(".jinja") and Path(self.chat_template).is_file():
            values["template_sha256"] = sha256_file(Path(self.chat_template))
        return values

    def first_model(self, recipe: "Recipe") -> dict[str, Any]:
        """Return the model's name and revision."""
        return recipe.model.model_dump(mode="json", include={"name", "revision"})

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """Raise PydanticCustomError where the recipe's release, model or blend does not fit the stage."""
        if recipe.release is None:
            raise invalid("names no NeMo-RL release", "release")
        if recipe.release not in load_releases():
            raise misnamed("release", "release", recipe.release, load_releases())
        if self.parent is None and not isinstance(recipe.model, PretrainedModel):
            raise invalid("NeMo-RL starts from a pretrained model: give its name", "model")
        blend = recipe.blends[self.blend]
        if blend.format == "mmpr_tiny" and self.data.get("val_size") != blend.holdout:
            raise invalid(f"must be the holdout of blend {self.blend}, {blend.holdout}", f"stages.{name}.data.val_size")

    def completed(self, recipe: "Recipe", name: str, key: Callable[..., str]) -> Self:
        """Return the stage with the nodes of its cluster; UserError for a launcher unknown to the release."""
        release = release_of(recipe.release)
        if self.launcher is not None and self.launcher not in release.launchers:
            known = nearest(self.launcher, release.launchers)
            raise UserError(
                f"{key('stages', name, 'launcher')}: {recipe.release} has no launcher {self.launcher}{known}"
            )
        besides = 0 if "judges_within_num_nodes" in release.can else self.cluster.judge_nodes
        nodes = {"nodes": self.cluster.num_nodes + besides}
        return self.model_copy(update={"resources": self.resources.model_copy(update=nodes)})

    @model_validator(mode="after")
    def _nodes_add_up(self) -> "NemoRlSettings":
        if self.cluster.generation_nodes >= self.cluster.num_nodes:
            raise invalid("cluster.generation_nodes leaves no node to train on")
        if self.resources.nodes != 1:
            raise invalid("resources.nodes follows from cluster here; leave it out")
        return self


STAGES = dict.fromkeys(("sft", "grpo", "dpo", "mpo"), NemoRlSettings)
