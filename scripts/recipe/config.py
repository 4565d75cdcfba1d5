"""config/config.yaml: the first file a user edits."""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt

from scripts.recipe.address import alert_address, store_address
from scripts.recipe.strict import Name, Place, Strict, Text, matching


class Tracking(Strict):
    """Log published stages in Weights & Biases, with the API key of the environment (WANDB_API_KEY)."""

    project: matching(r"^[\w.-]{1,128}$")
    entity: matching(r"^[\w.-]{1,128}$") | None = None
    """Team or user; none: the account's own."""


class Alerts(Strict):
    """Tell a person that a stage ends, stalls, fails or is stopped by its gate, or that Snakemake ends or dies."""

    urls: list[Annotated[Text, AfterValidator(alert_address)]] = Field(
        [], description="Apprise URLs without a credential, such as ntfy://ntfy.sh/topic."
    )
    urls_from: list[matching(r"^[A-Za-z_]\w*$")] = Field([], description="Environment variables with Apprise URLs.")
    command: list[Text] = Field([], description="Program and arguments; the message is its standard input.")


class Store(Strict):
    """A store of trainings beyond this tree, which projects and clusters share (docs/remote.md)."""

    remote: Annotated[Place, AfterValidator(store_address)] = Field(
        description="URL for fsspec: s3://bucket/prefix, gs://..., sftp://host/path, or a folder."
    )
    push: list[Literal["published", "exports", "last"]] = Field(["published"])
    """Copies published checkpoints with exports, exports alone, or the last checkpoint while a stage trains."""
    mb_per_second: PositiveFloat | None = None
    """Limit of a push; none: no limit."""
    pull: bool = True
    """Takes a stage that was trained elsewhere from there."""
    key: Literal["required", "none"] | None = None
    """`required`: takes and pushes only what is signed with the key in STAGECOACH_STORE_KEY; `none`: takes anything.
    Default: required, except in a folder of one's own."""


def _names(value: Any) -> Any:
    """Return the names in a text, parted by commas, as a list; leave other values unchanged."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class Config(Strict):
    """config/config.yaml: the first file a user edits."""

    recipe: Place = Field(description="Path of the recipe, from the project, or of a shipped recipe.")
    site: Place = Field(description="Path of the site, from the project, or of a shipped site.")
    run: Name | None = None
    """Results go to results/<run>/; none: to results/."""
    sample: PositiveInt | None = None
    """For a trial: only N training rows of each blend; results go to a folder sample-N."""
    results: Place = "results"
    """Where results go."""
    seed: int | None = None
    """Instead of the recipe's."""
    model: str | None = None
    """Name of the pretrained model to start from, instead of the recipe's."""
    start: str | None = None
    """The stage to start from the model, instead of the recipe's; earlier stages are left out."""
    again: Annotated[list[Name], BeforeValidator(_names)] = Field(
        [], description="Stages to train again although nothing changed, for a call: --config again=STAGE."
    )
    over_budget: bool = False
    """Train although the plan exceeds the site's budget_gpu_hours."""
    tracking: Tracking | None = None
    """Log published stages to W&B; none: nothing is logged."""
    alerts: Alerts | None = Field(None, description="Whom to tell; none: nobody.")

    store: Store | None = Field(None, description="Where trainings are shared; none: only below `results`.")

    compare: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = Field(
        [],
        description="Runs to show beside the current run in compare.html: names of runs below the results' root, or "
        "paths of folders of results, of other clones too. Differences are from the first.",
    )

    @property
    def folder(self) -> str:
        """The folder of the run's results."""
        parts = [self.results, self.run, f"sample-{self.sample}" if self.sample else None]
        return "/".join(part for part in parts if part)

    @property
    def compared(self) -> list[str]:
        """The folders of compared runs, by default with this run last; none without `compare`."""
        named = [run if "/" in run else f"{self.results}/{run}" for run in self.compare]
        same = os.path.relpath(self.folder)
        folders = [self.folder if os.path.relpath(folder) == same else folder for folder in named]
        return list(dict.fromkeys([*folders, self.folder])) if folders else []
