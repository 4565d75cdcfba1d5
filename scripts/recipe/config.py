"""config/config.yaml: what a user edits first."""

from typing import Annotated

from pydantic import Field, PositiveInt, StringConstraints

from scripts.recipe.strict import Name, Strict


class Tracking(Strict):
    """Where published stages are logged in Weights & Biases. The API key stays in the environment (WANDB_API_KEY)."""

    project: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,128}$")]
    entity: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,128}$")] | None = Field(
        None, description="Team or user; none: the account's own."
    )


class Config(Strict):
    """config/config.yaml: what a user edits first."""

    recipe: str = Field(description="Path of the recipe, from the repository's root.")
    site: str = Field(description="Path of the site, from the repository's root.")
    run: Name | None = Field(None, description="Results go to results/<run>/; none: to results/.")
    sample: PositiveInt | None = Field(
        None, description="For a trial: only N training rows of each blend; results go to a folder sample-N."
    )
    results: str = Field("results", description="Where results go.")
    seed: int | None = Field(None, description="Instead of the recipe's.")
    model: str | None = Field(None, description="Name of the pretrained model to start from, instead of the recipe's.")
    start: str | None = Field(
        None, description="The stage that starts from the model, instead of the recipe's; those before it are left out."
    )
    over_budget: bool = Field(False, description="Train although the plan exceeds the site's budget_gpu_hours.")
    tracking: Tracking | None = Field(None, description="Log published stages to W&B; none: nothing is logged.")

    @property
    def folder(self) -> str:
        """The folder that this run's results go to."""
        parts = [self.results, self.run, f"sample-{self.sample}" if self.sample else None]
        return "/".join(part for part in parts if part)
