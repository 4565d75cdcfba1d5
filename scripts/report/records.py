"""What a stage left in its directory, read for the report. Files that a recipe does not make are None."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from scripts.errors import UserError
from scripts.files import read_json
from scripts.report.cost import Cost, cost_of


@dataclass(frozen=True)
class StageFiles:
    """The published files of one stage, each read when it is asked for."""

    directory: Path

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.directory.name

    @property
    def is_trained(self) -> bool:
        """Whether the stage has published its checkpoint and the metrics of its steps."""
        return (self.directory / "ckpt/record.json").exists() and (self.directory / "metrics.parquet").exists()

    @cached_property
    def record(self) -> dict[str, Any]:
        """ckpt/record.json."""
        return read_json(self.directory / "ckpt/record.json")

    @property
    def parent(self) -> "StageFiles | None":
        """The stage that this one started from, whose directory lies beside."""
        parents = self.record["parents"]
        return StageFiles(self.directory.with_name(parents[0]["stage"])) if parents else None

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.parquet: one row a step."""
        path = self.directory / "metrics.parquet"
        if not path.exists():
            raise UserError(f"{path}: no such file; ask Snakemake for it: snakemake {path}")
        return pd.read_parquet(path)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved config, flat: dotted keys."""
        path = self.directory / "config.yaml"
        try:
            return dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8"))))
        except yaml.YAMLError as error:
            raise UserError(f"{path}: not valid YAML ({error}); delete it, and Snakemake writes it again") from None

    @cached_property
    def evaluation(self) -> dict[str, Any] | None:
        """eval.json."""
        return self._optional("eval.json")

    @cached_property
    def verdict(self) -> str | None:
        """The gate's verdict: pass, warn or stop."""
        gate = self._optional("gate.json")
        return gate and gate["verdict"]

    @cached_property
    def criteria(self) -> list[dict[str, Any]]:
        """Each of the gate's criteria with its value and outcome."""
        return (self._optional("criteria.json") or {"criteria": []})["criteria"]

    @cached_property
    def preflight(self) -> dict[str, Any]:
        """preflight.json."""
        return self._optional("preflight.json") or {}

    @cached_property
    def rollouts(self) -> pd.DataFrame | None:
        """rollouts.parquet: responses to held-out rows before and after the stage."""
        path = self.directory / "rollouts.parquet"
        return pd.read_parquet(path) if path.exists() else None

    @cached_property
    def cost(self) -> Cost:
        """What the attempts at the stage took."""
        return cost_of(self.directory / "run", self.metrics["seconds"])

    def _optional(self, name: str) -> Any:
        path = self.directory / name
        return read_json(path) if path.exists() else None


@dataclass(frozen=True)
class Score:
    """A held-out score before and after a stage; None: not known.

    `change` with its 95 % interval (`low`, `high`) is against what the stage started from, `from_first` against the
    first stage that was scored.
    """

    name: str
    rows: int | None
    before: float | None
    after: float
    change: float | None
    low: float | None
    high: float | None
    from_first: float | None
    from_first_low: float | None
    from_first_high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the change leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def scores_of(evaluation: dict[str, Any]) -> list[Score]:
    """The scores of an eval.json, an entry an environment, and the mean last."""
    entries = {**evaluation["environments"], "mean": evaluation["mean"]}
    return [_score(name, entry) for name, entry in entries.items()]


def _score(name: str, entry: dict[str, Any]) -> Score:
    before, after = entry["before"], entry["after"]
    change = {"value": None if before is None else after - before} | (entry.get("change") or {})
    first = entry.get("change_from_first") or {}
    bounds = [it.get(key) for it in (change, first) for key in ("value", "low", "high")]
    return Score(short_name(name), entry.get("rows"), before, after, *bounds)


def short_name(environment: str) -> str:
    """An environment's agent name without the endings that every agent shares."""
    for ending in ("_single_step_tool_use_with_argument_comparison_agent", "_simple_agent"):
        environment = environment.removesuffix(ending)
    return environment.removesuffix("_with_argument_comparison_agent")


def differing_settings(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The keys in which flat configs are not all the same, with the value in each; None where one lacks the key."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def changed_settings(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys in which two flat configs differ, with both values; None where a config lacks the key."""
    return [(key, *values) for key, values in differing_settings([one, other])]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted keys; lists are leaves."""
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [leaf for key, entry in value.items() for leaf in _flat(entry, f"{prefix}.{key}" if prefix else str(key))]
