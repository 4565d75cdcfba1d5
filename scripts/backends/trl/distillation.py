"""Settings of on-policy distillation from one teacher or several."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.backends.trl.algorithm import TrlConfig
from scripts.backends.trl.on_policy import RolloutSettings, RolloutTraining
from scripts.errors import UserError
from scripts.recipe.stage_settings import Teaching
from scripts.recipe.strict import Name, Strict, invalid

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe


class Distillation(Teaching):
    """On-policy distillation (arXiv:2306.13649): the student's own responses, a teacher's word on every token."""

    num_prompts_per_step: PositiveInt = Field(description="Prompts in a step, with a response each.")
    max_num_steps: PositiveInt


class DistillationLoss(Strict):
    """The divergence of teacher and student over the whole vocabulary, mean over the tokens of a step's responses."""

    kl_type: Literal["forward", "reverse", "jsd"] = "reverse"
    """Forward KL(teacher, student); reverse KL(student, teacher) (MiniLLM, arXiv:2306.08543); or generalized JSD."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of jsd, the teacher's share of the mixture; near 0 it is like forward, near 1 like reverse; none: 0.5."""

    @property
    def weight(self) -> float:
        """TRL's `beta`."""
        return {"forward": 0.0, "reverse": 1.0}.get(self.kl_type, self.beta or 0.5)

    @model_validator(mode="after")
    def _fits_together(self) -> "DistillationLoss":
        if self.beta is not None and self.kl_type != "jsd":
            raise invalid("beta is for kl_type: jsd; leave it out")
        return self


class DistillationTraining(RolloutTraining):
    """Distillation."""

    trainer = "scripts.backends.trl.distillation_trainer"

    algorithm: Literal["distillation"]
    distillation: Distillation
    loss_fn: DistillationLoss = DistillationLoss()

    @property
    def rows_per_step(self) -> int:
        """Prompts in a step."""
        return self.distillation.num_prompts_per_step

    @property
    def rows_per_update(self) -> int:
        """Responses in an update: all of the step's."""
        return self.distillation.num_prompts_per_step

    @property
    def shared_by_processes(self) -> dict[str, int | None]:
        """The prompts of a step."""
        return {"distillation.num_prompts_per_step": self.distillation.num_prompts_per_step}

    def prepare(self, processor: Any) -> tuple[Any, partial]:
        """Render prompts; UserError for environments with tools of their own."""
        from scripts.rewards.registry import environment_factory  # noqa: PLC0415

        if with_tools := [name for name in self.environments if environment_factory(name)]:
            names = ", ".join(with_tools)
            raise UserError(f"distillation plays no turns with an environment's tools; leave {names} out of the blend")
        return super().prepare(processor)


class DistillationConfig(TrlConfig, DistillationTraining):
    """The resolved config of distillation."""


class DistillationSettings(RolloutSettings, DistillationTraining):
    """A stage of distillation."""

    config_model = DistillationConfig
    ROLES = ("teachers",)

    teachers: dict[Name, Name] = Field({}, description="The teachers' starts by role, such as stages.")

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """Raise PydanticCustomError where recipe and stage do not fit, or teachers and environments do not."""
        super().check_in(recipe, name)
        self.distillation.check_in(recipe, name)
