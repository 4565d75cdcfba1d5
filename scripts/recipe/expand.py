"""Write out a recipe's sweeps as plain stages, before anything else of it is read.

A stage's ``sweep`` makes variants of it, stages named by what differs. A ``parent`` may name all of them, the best, or
an earlier checkpoint. Everything works on the file's raw values, with defaults laid under them.
"""

import math
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from scripts.files import canonical_json, sha256_text
from scripts.recipe.settings import merge
from scripts.recipe.strict import invalid, misnamed
from scripts.recipe.sweep import HELD_OUT_MEAN, KEYS, Halving, Interval, ParentChoice

Checked = TypeVar("Checked", bound=BaseModel)
MADE = ("sweeps", "checkpoints", "choices")
MOST_VARIANTS = 500


def expand(data: Any) -> Any:
    """A recipe's raw values with every sweep written out as stages; what has not the right shape is left as it is."""
    stages = data.get("stages") if isinstance(data, dict) else None
    if not isinstance(stages, dict) or not any(map(_is_swept, stages.values())):
        return data
    expansion = _Expansion(stages)
    for name in stages:
        expansion.names_of(name)
    expanded = data | {"stages": expansion.stages} | {key: getattr(expansion, key) for key in MADE}
    evaluation = data.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("stages"), list):
        scored = [name for stage in evaluation["stages"] for name in expansion.names.get(stage, [stage])]
        expanded["evaluation"] = evaluation | {"stages": scored}
    return expanded


def _is_swept(stage: Any) -> bool:
    return isinstance(stage, dict) and bool(stage.keys() & KEYS or isinstance(stage.get("parent"), dict))


class _Expansion:
    """What becomes of a recipe's stages, parents first; `names` are the variants of each, or its own name."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.stages: dict[str, Any] = {}
        self.names: dict[str, list[str]] = {}
        self.sweeps: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.choices: dict[str, dict[str, Any]] = {}

    def names_of(self, name: str) -> list[str]:
        """A stage's variants, written out if they are not yet; its own name where it has none."""
        if name not in self.names:
            self.names[name] = [name]  # a circle of parents ends here, and is refused with the other stages
            self._write_out(name)
        return self.names[name]

    def _write_out(self, name: str) -> None:
        stage = self.raw[name]
        if not isinstance(stage, dict):
            self.stages[name] = stage
            return
        settings = {key: value for key, value in stage.items() if key not in KEYS}
        parents = self._parents(name, stage.get("parent"))
        points = list(_points(name, stage["sweep"])) if "sweep" in stage else [{}]
        if (count := len(parents) * len(points)) > MOST_VARIANTS:
            raise invalid(f"makes {count} variants; at most {MOST_VARIANTS}", f"stages.{name}.sweep")
        labels = _labels(points)
        variants: dict[str, dict[str, Any]] = {}
        for (origin, parent), point in product(parents.items(), points):
            words = [origin, *(f"{labels[key]}-{_text(value)}" for key, value in point.items())]
            variant = ".".join([name, *filter(None, words)])
            if variant in variants:
                raise invalid(f"two variants would be named {variant}; leave one out", f"stages.{name}.sweep")
            laid = settings if parent is None else settings | {"parent": parent}
            for key, value in point.items():
                laid = merge(laid, _nested(key, value))
            self.stages[variant] = laid
            variants[variant] = ({"parent": parent} if origin else {}) | point
        self.names[name] = list(variants)
        if [*variants] != [name]:
            self.sweeps[name] = {"variants": variants, "rungs": []}
        by = stage.get("best")
        if "halving" in stage:
            halving = _checked(Halving, stage["halving"], f"stages.{name}.halving")
            self._halve(name, halving)
            by = by or halving.by
        if by is not None and len(self.names[name]) == 1:
            raise invalid("there is no sweep to choose the best of; leave it out", f"stages.{name}.best")
        if by is not None:
            self._choose(name, str(by), self.names[name])

    def _parents(self, name: str, parent: Any) -> dict[str, str | None]:
        """What each variant starts from, by the word for it in its name; of a single start there is none."""
        at = f"stages.{name}.parent"
        if not isinstance(parent, dict):
            if isinstance(parent, str) and parent in self.raw and [parent] != (names := self.names_of(parent)):
                raise invalid(
                    f"{parent} has variants: start from one ({names[0]}), or {{stage: {parent}, each: true}}, or "
                    f"{{stage: {parent}, best: {HELD_OUT_MEAN}}}",
                    at,
                )
            return {"": parent if isinstance(parent, str) else None}
        wanted = _checked(ParentChoice, parent, at)
        known = {**self.raw, **self.stages}
        if wanted.stage not in known:
            raise misnamed(f"{at}.stage", "stage", wanted.stage, self.raw)
        names = self.names_of(wanted.stage) if wanted.stage in self.raw else [wanted.stage]
        among = [start for step in self._steps(wanted, at) for start in self._as_of(names, step, at)]
        if wanted.each and (self.sweeps.get(wanted.stage, {}).get("rungs") or wanted.best):
            raise invalid("each goes neither with best nor with a halved sweep; name best", at)
        if len(among) == 1:
            return {"": among[0]}
        if wanted.each:
            return {start.removeprefix(f"{wanted.stage}."): start for start in among}
        if wanted.best is None and len(names) > 1:
            raise invalid(f"{wanted.stage} has variants: say each: true, or best: {HELD_OUT_MEAN}", at)
        return {"": self._choose(wanted.stage, wanted.best or HELD_OUT_MEAN, among)}

    def _choose(self, stage: str, by: str, among: list[str]) -> str:
        """The name of a choice among variants or checkpoints of a stage, of those that its halving keeps."""
        rungs = self.sweeps.get(stage, {}).get("rungs", [])
        of = ".checkpoints" if {*among} & self.checkpoints.keys() else ""
        name = f"{stage}{of}.best-{_word(by)}"
        self.choices[name] = {"stage": stage, "by": by, "among": among, "after": rungs[-1] if rungs else None}
        return name

    def _steps(self, wanted: ParentChoice, at: str) -> list[int | None]:
        """The steps that are chosen among; None: the last."""
        if wanted.checkpoint != "best":
            steps = wanted.checkpoint if isinstance(wanted.checkpoint, list) else [wanted.checkpoint]
            return [None if step == "last" else step for step in steps]
        stage = self.raw.get(wanted.stage) or self.stages[wanted.stage]
        if (last := _last_step(stage)) is None:
            raise invalid(f"nothing says how many steps {wanted.stage} has; list them: checkpoint: [10, 20]", at)
        return [*range(_save_period(stage), last, _save_period(stage)), None]

    def _as_of(self, names: list[str], step: int | None, at: str) -> Iterator[str]:
        """The names of stages as of a step, whose checkpoints are kept from now on."""
        for name in names:
            if step is None:
                yield name
                continue
            stage = self.stages.get(name)  # None: in a circle of parents
            if stage is None:
                raise invalid(f"{name} comes after itself", at)
            if step % _save_period(stage) or step > (_last_step(stage) or step):
                saves = f"{name} saves every {_save_period(stage)} steps, of {_last_step(stage) or 'all its data'}"
                raise invalid(f"no checkpoint is of step {step}: {saves}", at)
            kept = {*stage.get("checkpointing", {}).get("keep_steps", []), step}
            self.stages[name] = merge(stage, {"checkpointing": {"keep_steps": sorted(kept)}})
            of_step = f"{name}.step-{step}"
            self.checkpoints.setdefault(of_step, {"stage": name, "step": step, "after": name})
            yield of_step

    def _halve(self, name: str, halving: Halving) -> None:
        at, names = f"stages.{name}.halving", self.names[name]
        if name not in self.sweeps:
            raise invalid("there is no sweep to halve; leave it out", at)
        if halving.steps != sorted({*halving.steps}):
            raise invalid("must ascend", f"{at}.steps")
        kept, before = Fraction(len(names)), None
        for step in halving.steps:
            kept *= Fraction(halving.keep).limit_denominator(1000)
            among = list(self._as_of(names, step, f"{at}.steps"))
            for checkpoint in among:
                self.checkpoints[checkpoint]["after"] = before
            rung = f"{name}.rung-{step}"
            keep = max(1, math.floor(kept))
            self.choices[rung] = {"stage": name, "by": halving.by, "among": among, "keep": keep, "after": before}
            self.sweeps[name]["rungs"].append(rung)
            before = rung


def _points(name: str, sweep: Any) -> Iterator[dict[str, Any]]:
    """The points of a sweep, each a value by key: listed, drawn, or all of a grid."""
    at = f"stages.{name}.sweep"
    if isinstance(sweep, list) and sweep and all(isinstance(point, dict) and point for point in sweep):
        yield from sweep
    elif isinstance(sweep, dict) and "draw" in sweep:
        count, seed = sweep["draw"], sweep.get("draw_seed", 0)
        keys = {key: values for key, values in sweep.items() if key not in ("draw", "draw_seed")}
        if not isinstance(count, int) or not 0 < count <= MOST_VARIANTS or not isinstance(seed, int) or not keys:
            raise invalid("draw is how many points, draw_seed another whole number; besides stand the keys", at)
        generator = random.Random(seed)
        for _ in range(count):
            yield {key: _drawn(generator, values, f"{at}.{key}") for key, values in keys.items()}
    elif isinstance(sweep, dict) and sweep and all(isinstance(values, list) and values for values in sweep.values()):
        yield from (dict(zip(sweep, values, strict=True)) for values in product(*sweep.values()))
    else:
        raise invalid("is a list of values for each key, a list of points, or draw with values to draw from", at)


def _drawn(generator: random.Random, values: Any, at: str) -> Any:
    """A value, to three digits where it is drawn from an interval."""
    if isinstance(values, list) and values:
        return generator.choice(values)
    interval = _checked(Interval, values, at)
    if not interval.low < interval.high or (interval.log and interval.low <= 0):
        raise invalid("low must lie below high, and above 0 with log", at)
    if interval.log:
        return float(f"{math.exp(generator.uniform(math.log(interval.low), math.log(interval.high))):.3g}")
    return float(f"{generator.uniform(interval.low, interval.high):.3g}")


def _labels(points: list[dict[str, Any]]) -> dict[str, str]:
    """What a variant's name calls each key: its last word, or all of them where two keys end alike."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: _word(key if ends.count(end) > 1 else end) for key, end in zip(keys, ends, strict=True)}


def _text(value: Any) -> str:
    """A value as part of a name."""
    if isinstance(value, float):
        return f"{value:.6g}".replace("+", "")
    if isinstance(value, list | dict):
        return sha256_text(canonical_json(value))[:6]
    return _word(str(value))


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.") or "none"


def _nested(key: str, value: Any) -> dict[str, Any]:
    """The settings that a dotted key names."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _save_period(stage: dict[str, Any]) -> int:
    checkpointing = stage.get("checkpointing")
    period = checkpointing.get("save_period") if isinstance(checkpointing, dict) else None
    return period if isinstance(period, int) and period > 0 else 10


def _last_step(stage: dict[str, Any]) -> int | None:
    section = stage.get(stage.get("algorithm"))
    last = (section if isinstance(section, dict) else {}).get("max_num_steps", stage.get("max_num_steps"))
    return last if isinstance(last, int) else None


def _checked(model: type[Checked], values: Any, at: str) -> Checked:
    """The values as a model; the first mistake is the error."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = first.get("ctx", {}).get("key")
        place = ".".join([at, *(str(part) for part in first["loc"] if part != "[key]"), *([key] if key else [])])
        raise invalid(first["msg"][0].lower() + first["msg"][1:], place) from None
