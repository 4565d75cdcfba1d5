"""The files of a published stage, as the pages show them, and the cost by hours and GPU-hours of the attempts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import pandas as pd

from scripts.errors import UserError
from scripts.files import AGAIN, duration
from scripts.recipe.resolve import read_values
from scripts.recipe.yaml_file import leaves
from scripts.records import (
    Benchmarks,
    CheckpointRecord,
    Criteria,
    Evaluation,
    Gate,
    HeldOutLoss,
    JudgedCriterion,
    read_if_there,
    read_record,
)
from scripts.report.page import number_text, short_name
from scripts.report.scores import scores_of
from scripts.stage.again import words_of_again
from scripts.stage.amendment import words_of_amendments
from scripts.stage.bootstrap import Change, changes
from scripts.stage.measured import held_out_loss
from scripts.stage.paths import StagePaths
from scripts.stage.stopping import words_of_selected
from scripts.stage.tables import METRICS, ROLLOUTS, ROW, read_table
from scripts.stage.training_folder import TrainingFolder

AS_OF = ".step-"
"""The mark between a stage's name and the step of an earlier checkpoint."""


class Cost(NamedTuple):
    """Hours of a stage.

    `hours` is the wall time of all attempts, `step_hours` the share spent in steps of the final weights; the rest went
    into starting, saving and repeated steps. `gpu_hours` is None where an attempt does not tell its GPUs. `at_least`:
    an attempt was killed, so only the steps left behind count.
    """

    attempts: int
    hours: float
    step_hours: float
    gpu_hours: float | None
    at_least: bool

    @property
    def mark(self) -> str:
        """The sign in front of a lower bound."""
        return "≥ " if self.at_least else ""

    @property
    def text(self) -> str:
        """Hours and known GPU-hours in words."""
        gpu_hours = f", {self.mark}{number_text(self.gpu_hours)} GPU-hours" if self.gpu_hours else ""
        return f"{self.mark}{duration(3600 * self.hours)}{gpu_hours}"


def is_trained(paths: StagePaths) -> bool:
    """Tell whether the stage has published a checkpoint and metrics."""
    return paths.record.exists() and paths.metrics.exists()


def part(read: Callable[["TrainedStage"], Any], about: str) -> cached_property:
    """Return the property of a part of a stage, read once when first asked for."""
    found = cached_property(read)
    found.__doc__ = about
    return found


@dataclass(frozen=True)
class TrainedStage:
    """A published stage, each file read once when first asked for; UserError where damaged, or missing but needed."""

    paths: StagePaths

    def read(self, *parts: str) -> Self:
        """Read some parts now, to find damage before a page is written."""
        for part in parts:
            getattr(self, part)
        return self

    record = part(lambda stage: read_record(stage.paths.record, CheckpointRecord), "The checkpoint's record.")
    settings = part(lambda stage: dict(leaves(read_values(stage.paths.config))), "The resolved config by dotted keys.")
    evaluation = part(lambda stage: read_if_there(stage.paths.evaluation, Evaluation), "The held-out scores, or None.")
    benchmarks = part(lambda stage: read_if_there(stage.paths.benchmarks, Benchmarks), "Scores on benchmarks, or None.")

    @cached_property
    def cost(self) -> Cost:
        """The Cost of all attempts."""
        return cost_of(TrainingFolder(self.paths.run), self.metrics["seconds"])

    @cached_property
    def logged(self) -> pd.DataFrame:
        """One row a step, and before these what held-out rows gave before the first step; UserError without any."""
        logged = read_table(self.paths.metrics, METRICS).to_pandas()
        if logged.empty:
            raise UserError(f"{self.paths.metrics}: damaged (no step in it); {AGAIN}")
        return logged

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a step; UserError without any."""
        is_step = self.logged["seconds"].notna() | self.logged["validation_loss"].isna()
        return self.logged[is_step].reset_index(drop=True)

    @property
    def selected(self) -> str:
        """Which checkpoint of how many steps is published, in words; nothing for a stage that is not stopped early."""
        return words_of_selected(self.record)

    @property
    def again(self) -> str:
        """The comparison with the training before, in words; nothing for a first training."""
        return words_of_again(self.record)

    @property
    def amendments(self) -> list[str]:
        """The amendments by which the stage went on from another training, in words."""
        return words_of_amendments(self.record)

    @cached_property
    def validation(self) -> HeldOutLoss | None:
        """What held-out rows of written answers gave before and after the stage; None: none were measured."""
        return held_out_loss(read_table(self.paths.metrics, METRICS).to_pylist(), self.record["step"])

    @cached_property
    def rollouts(self) -> pd.DataFrame | None:
        """Each held-out row's responses and rewards before and after the stage; None without rollouts."""
        if not self.paths.rollouts.exists():
            return None
        return read_table(self.paths.rollouts, ROLLOUTS).to_pandas().dropna(subset="reward_after")

    @cached_property
    def way(self) -> dict[str, Any]:
        """The chat template and, where recorded, the decoding of the held-out scores, without the seed."""
        record: Any = self.record
        while "chat_template" not in record and record.get("parents"):
            record = record["parents"][0]
        named = record.get("chat_template")
        template = f"{named['name']} ({named['sha256'][:16]})" if named else "the model's own"
        decoding = (self.evaluation or {}).get("decoding", {})
        return {key: value for key, value in decoding.items() if key != "seed"} | {"chat template": template}

    def is_asked_like(self, other: "TrainedStage") -> bool:
        """Tell whether both stages were asked alike; an early version recorded no decoding."""
        return len(self.way) == 1 or len(other.way) == 1 or self.way == other.way

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The data and the evaluation, as far as recorded."""
        hashes, data = self.record["facts"], self.record.get("data") or {}
        source = data.get("source") or {}
        return {
            "data: blend": data.get("blend"),
            "data: source": " at ".join(source[key] for key in ("name", "revision") if key in source),
            "data: training split": (hashes["train_split"] or "")[:16],
            "data: validation split": (hashes["validation_split"] or "")[:16],
            "evaluation: held-out rows": None if self.rollouts is None else len(self.rollouts),
        } | {f"evaluation: {key}": value for key, value in self.way.items()}

    @cached_property
    def criteria(self) -> list[JudgedCriterion]:
        """The gate's criteria with values and outcomes."""
        return (read_if_there(self.paths.criteria, Criteria) or {"criteria": []})["criteria"]

    @cached_property
    def row(self) -> dict[str, Any]:
        """The stage's row of summary.csv; unmeasured cells are empty."""
        gate, first, last = read_if_there(self.paths.gate, Gate), self.metrics.iloc[0], self.metrics.iloc[-1]
        return {
            "stage": self.paths.name,
            "gate": gate and gate["verdict"],
            **held_out(self.evaluation),
            "reward_first": first["reward_mean"],
            "reward_last": last["reward_mean"],
            "loss_last": last["loss"],
            **validation_cells(self.validation),
            "steps": self.record["step"],
            "hours": self.cost.hours,
            "gpu_hours": self.cost.gpu_hours,
            "training_seconds": round(self.metrics["seconds"].sum(), 1),
            "kl_last": last["kl"],
            "entropy_last": last["entropy"],
            "response_length_last": last["response_length_mean"],
            "truncation_last": last["truncation_rate"],
            "parent": ", ".join(parent["stage"] for parent in self.record["parents"]),
            "identity": self.record["identity"],
        }


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum over stages; GPU-hours are the known ones, None where none are."""
    costs = list(costs)
    known = [cost.gpu_hours for cost in costs if cost.gpu_hours is not None]
    return Cost(
        attempts=sum(cost.attempts for cost in costs),
        hours=sum(cost.hours for cost in costs),
        step_hours=sum(cost.step_hours for cost in costs),
        gpu_hours=sum(known) if known else None,
        at_least=any(cost.at_least for cost in costs),
    )


def cost_of(training: TrainingFolder, step_seconds: pd.Series) -> Cost:
    """Return the cost of the steps that `step_seconds` lists, by the attempts of a training.

    Without recorded attempts the steps alone count, as a lower bound. A killed attempt came at least to the step where
    the next one went on; an attempt beyond the last step counts by its share of steps.
    """
    in_steps, last, pace = float(step_seconds.sum()) / 3600, len(step_seconds), step_seconds.median()
    attempts = [entry for entry in training.attempts if entry["outcome"] != "waited" and entry["from"] < last]
    if not attempts:
        return Cost(0, in_steps, in_steps, None, at_least=True)
    table = pd.DataFrame(attempts, columns=["from", "to", "time", "ended", "gpus"], dtype=float)
    to_last = (last - table["from"]) / (table["to"].clip(lower=last) - table["from"])
    killed = (table["from"].shift(-1, fill_value=last) - table["from"]) * pace
    hours = (to_last * (table["ended"] - table["time"])).fillna(killed).clip(lower=0) / 3600
    return Cost(
        attempts=len(attempts),
        hours=float(hours.sum()),
        step_hours=min(in_steps, float(hours.sum())),
        gpu_hours=None if table["gpus"].isna().any() else float((hours * table["gpus"]).sum()),
        at_least=bool(table["ended"].isna().any()),
    )


def held_out(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the cells of held-out scores; empty without scores or comparison."""
    *environments, mean = scores_of(evaluation) or [None]
    changes = {score.name: score.after - score.before for score in environments if score.before is not None}
    return {
        "held_out_before": mean and mean.before,
        "held_out_after": mean and mean.after,
        "worst_environment": min(changes, key=changes.get, default=None),
        "worst_change": min(changes.values(), default=None),
    }


def validation_cells(found: HeldOutLoss | None) -> dict[str, Any]:
    """Return the cells of held-out rows of written answers; empty without any."""
    loss = (found or {}).get("loss", {})
    accuracy = (found or {}).get("accuracy", {})
    return {
        "validation_loss_before": loss.get("before"),
        "validation_loss_after": loss.get("after"),
        "validation_accuracy_after": accuracy.get("after"),
    }


def changes_between(
    first: pd.DataFrame | None, second: pd.DataFrame | None, column: str = "reward_after"
) -> Mapping[str, Change | None]:
    """Return the changes of `rewards` on the common rows, from the first's column, by environment and of the mean."""
    if first is None or second is None:
        return {}
    keys = ["environment", *ROW]
    both = first[[*keys, column]].rename(columns={column: "from"}).merge(second[[*keys, "reward_after"]], on=keys)
    differences = {name: (part["reward_after"] - part["from"]).to_numpy() for name, part in both.groupby("environment")}
    found, mean = changes(differences)
    return {short_name(name): change for name, change in found.items()} | {"mean": mean}


def differing_settings(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the keys with different values in flat configs, with each config's value or None."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
