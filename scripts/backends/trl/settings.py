"""The settings of backend `trl`: stages of supervised fine-tuning, reinforcement and preference optimisation."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from scripts.backends.trl.algorithms import PromptData, leave_out
from scripts.backends.trl.training import (
    DpoConfig,
    DpoTraining,
    GrpoConfig,
    GrpoTraining,
    MpoConfig,
    MpoTraining,
    SftConfig,
    SftTraining,
)
from scripts.errors import UserError
from scripts.recipe.gym import JUDGES_GONE, GymServer, ServerName, check_gym
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.pins import pinned_versions
from scripts.recipe.probe import Probe
from scripts.recipe.stage import StageSettings, TrainingConfig
from scripts.recipe.strict import invalid
from scripts.rows.chat_format import read_template

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe
    from scripts.recipe.site import Site

PACKAGES = ("trl", "transformers", "torch", "accelerate")


class TrlSettings(StageSettings):
    """What all stages have in common."""

    def release_in(self, recipe: "Recipe") -> dict[str, str]:
        """The versions that envs/trl.txt pins."""
        return pinned_versions("trl", self.packages)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that decide its weights."""
        lora, optimizer = self.policy.lora, self.policy.optimizer
        in_bits = optimizer.name == "adamw_8bit" or (lora is not None and lora.quantization is not None)
        return (*PACKAGES, *(["peft"] if lora else []), *(["bitsandbytes"] if in_bits else []))

    def spare_bitsandbytes(self) -> None:
        """Keep peft from importing it in this process, which takes a second, where the stage does not need it."""
        if "bitsandbytes" not in self.packages:
            sys.modules.setdefault("bitsandbytes", None)

    def values_with_effect(self) -> dict[str, Any]:
        """What it says that may change weights, but for rounding; what was added since is there where it is not off."""
        values = super().values_with_effect()
        if self.chat_template is not None:
            values["policy"]["tokenizer"]["chat_template"] = read_template(self.chat_template)
        leave_out(values["policy"]["tokenizer"], self.policy.tokenizer)
        leave_out(values["policy"], self.policy)
        leave_out(values["policy"]["optimizer"], self.policy.optimizer)
        return values

    def starts_from_export(self, recipe: "Recipe") -> bool:
        """Whether it starts from an export, as which a pretrained model comes as well."""
        return self.parent is not None or isinstance(recipe.model, PretrainedModel)

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """PydanticCustomError where the recipe's model or the stage's blend are not for this backend."""
        if self.needs_export and not self.starts_from_export(recipe):
            advice = "give it a parent, or make the recipe's model a pretrained one"
            raise invalid(f"{self.needs_export}; {advice}", f"stages.{name}")
        if recipe.blends[self.blend].format != "jsonl":
            raise invalid("only NeMo-RL trains on images", f"stages.{name}.blend")

    def completed(self, recipe: "Recipe", name: str, key: Callable[..., str]) -> Self:
        """Return the stage; UserError where the chat template that it names is not there."""
        if self.chat_template is not None:
            try:
                read_template(self.chat_template)
            except UserError as error:
                at = key("stages", name, "policy", "tokenizer", "chat_template")
                raise UserError(f"{at}: {error}") from None
        return self

    @property
    def needs_export(self) -> str | None:
        """Why it cannot start from a fresh model; None where it can."""
        return "policy.lora is laid over a model that was trained" if self.policy.lora else None


class SftSettings(TrlSettings, SftTraining):
    """A stage of supervised fine-tuning."""

    config_model: ClassVar[type[TrainingConfig]] = SftConfig

    def values_with_effect(self) -> dict[str, Any]:
        """What it says that may change weights."""
        values = super().values_with_effect()
        leave_out(values["sft"], self.sft)
        return values


class GrpoSettings(TrlSettings, GrpoTraining):
    """A stage of reinforcement learning."""

    config_model: ClassVar[type[TrainingConfig]] = GrpoConfig
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = StageSettings.WITHOUT_EFFECT | {"gym_servers", "probe"}

    gone: ClassVar[dict[str, str]] = JUDGES_GONE

    gym_servers: dict[ServerName, GymServer] = Field({}, description="How Gym's servers are reached, by name.")
    probe: Probe = Probe()

    def release_in(self, recipe: "Recipe") -> dict[str, str]:
        """The versions that envs/trl.txt pins, or envs/vllm.txt where vLLM samples."""
        return pinned_versions("vllm", (*self.packages, "vllm")) if self.samples_by_vllm else super().release_in(recipe)

    def values_with_effect(self) -> dict[str, Any]:
        """What it says that may change weights; what is said of vLLM only where vLLM samples."""
        values = super().values_with_effect()
        if self.gym is None:
            del values["gym"]
        if self.data == PromptData():
            del values["data"]
        leave_out(values["policy"]["generation"], self.policy.generation)
        if not self.samples_by_vllm:
            del values["policy"]["generation"]["backend"]
            del values["loss_fn"]["use_importance_sampling_correction"]
            del values["loss_fn"]["truncated_importance_sampling_ratio"]
        return values

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """PydanticCustomError where the recipe's model or the stage's blend are not for this backend."""
        super().check_in(recipe, name)
        if self.samples_by_vllm and isinstance(recipe.model, RandomModel) and recipe.model.vision is not None:
            raise invalid(
                "vllm samples for models without vision only; make it transformers",
                f"stages.{name}.policy.generation.backend",
            )

    @property
    def needs_export(self) -> str | None:
        """Why it cannot start from a fresh model; None where it can."""
        return "policy.generation.backend vllm starts from an export" if self.samples_by_vllm else super().needs_export

    def python_on(self, site: "Site") -> str:
        """The Python that trains it: one with vLLM where that samples."""
        return site.vllm_python if self.samples_by_vllm and site.vllm_python else "python"

    @model_validator(mode="after")
    def _fits_together(self) -> "GrpoSettings":
        check_gym(self.gym, self.gym_servers)
        if self.loss_fn.use_importance_sampling_correction and not self.samples_by_vllm:
            raise invalid("loss_fn.use_importance_sampling_correction is for policy.generation.backend: vllm")
        return self


class PreferenceSettings(TrlSettings):
    """What stages of preference optimisation have in common."""

    @property
    def needs_export(self) -> str | None:
        """Why it cannot start from a fresh model; None where it can."""
        return f"{self.algorithm} departs from a reference, which a fresh model is not"


class DpoSettings(PreferenceSettings, DpoTraining):
    """A stage of direct preference optimisation."""

    config_model: ClassVar[type[TrainingConfig]] = DpoConfig


class MpoSettings(PreferenceSettings, MpoTraining):
    """A stage of mixed preference optimisation."""

    config_model: ClassVar[type[TrainingConfig]] = MpoConfig


STAGES = {"sft": SftSettings, "grpo": GrpoSettings, "dpo": DpoSettings, "mpo": MpoSettings}
