"""The files of a published stage, as the pages show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import pandas as pd

from scripts.errors import UserError
from scripts.recipe.resolve import read_values
from scripts.recipe.yaml_file import leaves
from scripts.records import (
    AGAIN,
    Benchmarks,
    CheckpointRecord,
    Criteria,
    Evaluation,
    Gate,
    JudgedCriterion,
    read_if_there,
    read_record,
)
from scripts.report.cost import Cost, cost_of
from scripts.report.page import short_name
from scripts.stage.bootstrap import Change, changes
from scripts.stage.paths import StagePaths
from scripts.stage.tables import METRICS, ROLLOUTS, ROW, read_table

AS_OF = ".step-"
"""The mark between a stage's name and the step of an earlier checkpoint."""


def is_trained(paths: StagePaths) -> bool:
    """Tell whether the stage has published a checkpoint and metrics."""
    return paths.record.exists() and paths.metrics.exists()


@dataclass(frozen=True)
class TrainedStage:
    """A published stage, each file read once when first asked for; UserError where damaged, or missing but needed."""

    paths: StagePaths

    def read(self, *parts: str) -> Self:
        """Read some parts now, to find damage before a page is written."""
        for part in parts:
            getattr(self, part)
        return self

    @cached_property
    def record(self) -> CheckpointRecord:
        """The checkpoint's record."""
        return read_record(self.paths.record, CheckpointRecord)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a step; UserError without any."""
        metrics = read_table(self.paths.metrics, METRICS).to_pandas()
        if metrics.empty:
            raise UserError(f"{self.paths.metrics}: damaged (no step in it); {AGAIN}")
        return metrics

    @cached_property
    def cost(self) -> Cost:
        """The cost of all attempts."""
        return cost_of(self.paths.run, self.metrics["seconds"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved config with dotted keys."""
        return dict(leaves(read_values(self.paths.config)))

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The held-out scores."""
        return read_if_there(self.paths.evaluation, Evaluation)

    @cached_property
    def benchmarks(self) -> Benchmarks | None:
        """The scores on benchmarks."""
        return read_if_there(self.paths.benchmarks, Benchmarks)

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
        judged = read_if_there(self.paths.criteria, Criteria)
        return judged["criteria"] if judged else []

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


def held_out(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the cells of held-out scores; empty without scores or comparison."""
    if evaluation is None:
        return dict.fromkeys(("held_out_before", "held_out_after", "worst_environment", "worst_change"))
    scored = {name: entry for name, entry in evaluation["environments"].items() if entry["before"] is not None}
    changes = {short_name(name): entry["after"] - entry["before"] for name, entry in scored.items()}
    return {
        "held_out_before": evaluation["mean"]["before"],
        "held_out_after": evaluation["mean"]["after"],
        "worst_environment": min(changes, key=lambda name: changes[name], default=None),
        "worst_change": min(changes.values(), default=None),
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
