"""How held-out scores are taken."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from scripts.recipe.gym import Gym, GymServer, ServerName, check_gym
from scripts.recipe.judges import Judges, JudgeServer, Role, check_servers
from scripts.recipe.sampling import Sampling, TemplateVariables
from scripts.recipe.strict import Name, Strict, invalid, misnamed

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe
    from scripts.recipe.stage import StageSettings


class EvaluationBase(Strict):
    """What every kind of evaluation answers."""

    def scores(self, stage: "StageSettings") -> bool:
        """Whether a stage gets held-out scores."""
        raise NotImplementedError

    def blends_in(self, recipe: "Recipe") -> list[str]:
        """The blends of which each scored stage's export answers the validation rows; none: its own blend's alone."""
        return []

    def check_in(self, recipe: "Recipe") -> None:
        """PydanticCustomError where it does not fit the rest of the recipe."""

    def stage_while_scoring(self, recipe: "Recipe", name: str) -> "StageSettings":
        """The stage with the resources that its scoring gets."""
        return recipe.stages[name]


class Evaluation(EvaluationBase, Sampling):
    """How held-out scores are taken: every blend's validation rows, one response a row."""

    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    chat_template_kwargs: TemplateVariables = Field(
        {}, description="Variables of the chat template, such as enable_thinking."
    )
    blends: list[Name] | None = Field(None, description="None: every blend of prompts.")
    judges: Judges | None = Field(None, description="None: only rows that need no judge can be scored.")
    judge_servers: dict[Role, JudgeServer] = Field({}, description="Where the judges answer.")
    gym: Gym | None = Field(None, description="None: the verifiers here score the rows.")
    gym_servers: dict[ServerName, GymServer] = Field({}, description="How Gym's servers are reached, by name.")

    @property
    def more_decoding(self) -> dict[str, Any]:
        """How responses are decoded besides temperature and length, where anything is said of that."""
        names = {*Sampling.model_fields, "chat_template_kwargs"} - {"temperature", "max_new_tokens"}
        return self.model_dump(mode="json", include=names, exclude_defaults=True)

    @model_validator(mode="after")
    def _judges_are_served(self) -> "Evaluation":
        check_servers(self.judges, self.judge_servers)
        check_gym(self.gym, self.gym_servers)
        return self

    def scores(self, stage: "StageSettings") -> bool:
        """Whether the stage's checkpoints are in Hugging Face's format, which transformers loads on this machine."""
        return not stage.is_converted

    def blends_in(self, recipe: "Recipe") -> list[str]:
        """The blends whose validation rows are scored."""
        return self.blends or [name for name, blend in recipe.blends.items() if blend.kind == "prompts"]

    def check_in(self, recipe: "Recipe") -> None:
        """PydanticCustomError where no stage or no row can be scored."""
        if not recipe.scored_stages():
            raise invalid("these keys are for backend trl; NeMo-RL takes held_out, benchmarks and nodes", "evaluation")
        prompts = [name for name, blend in recipe.blends.items() if blend.kind == "prompts"]
        for name in self.blends or ():
            if name not in prompts:
                raise misnamed("evaluation.blends", "blend of prompts", name, prompts)
        if not self.blends_in(recipe):
            raise invalid("no blend of prompts to take held-out rows from", "evaluation")
        scored = [name for blend in self.blends_in(recipe) for name in recipe.blends[blend].environments]
        for name, stage in recipe.stages.items():
            for place, criterion in enumerate(stage.gate):
                if criterion.environment not in (None, *scored):
                    at = f"stages.{name}.gate.{place}.environment"
                    raise misnamed(at, "held-out environment", criterion.environment, scored)
