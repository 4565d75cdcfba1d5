"""Write a recipe's sweeps out as plain stages, before the recipe is validated.

A stage's ``sweep`` makes variants: stages named by their differing settings. A ``parent`` may name a variant, all of
them, the best or an earlier checkpoint; any other role, or a generated blend's maker, names one of these, as
``{stage: NAME, best: SCORE}``. Functions read the raw values of the file, over defaults.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt, ValidationError, WithJsonSchema

from scripts.files import canonical_json, sha256_text
from scripts.recipe.strict import Name, Strict, invalid, refuse_misnamed
from scripts.recipe.yaml_file import merge, nested

HELD_OUT_MEAN = "held_out_mean"
VALIDATED = {"validation_loss": False, "validation_accuracy": True, "validation_margin": True}
"""Figures of held-out rows of written answers by which the best is chosen, and whether higher is better."""
KEYS = frozenset({"sweep", "best"})
MOST_VARIANTS = 1000
"""Most variants of a stage."""
MADE = ("sweeps", "checkpoints", "choices")


def _check_steps(value: Any) -> Any:
    if not all(type(step) is int and step > 0 for step in (value if isinstance(value, list) and value else [value])):
        raise invalid("is a step or a list of steps; none: the last")
    return value


class ParentChoice(Strict):
    """Variants or checkpoints of a stage to start from."""

    stage: Name
    each: bool = False
    """Start from each: the stage gets as many variants."""
    best: str | None = None
    """Start from the best by held_out_mean, a task's score or a figure of held-out rows, as validation_loss."""
    checkpoint: Annotated[PositiveInt | list[PositiveInt] | None, BeforeValidator(_check_steps)] = None
    """Start from this step, or from the best of these; none: from the last."""


class CheckpointOf(Strict):
    """A stage as of a step."""

    stage: Name
    step: int


class Choice(Strict):
    """The best of a stage's variants or checkpoints."""

    stage: Name
    by: str
    among: list[Name]


_VALUES = {"type": "array", "minItems": 1}
SWEEP_SCHEMA = {
    "anyOf": [
        {"type": "object", "description": "A grid: values by dotted key.", "additionalProperties": _VALUES},
        {**_VALUES, "description": "Points: a value for each key.", "items": {"type": "object"}},
    ]
}
Start = Annotated[Name, WithJsonSchema({"anyOf": [{"type": "string"}, ParentChoice.model_json_schema()]})]
"""A start's name, which a recipe's file may also give as a choice."""


def expand(data: Any) -> Any:
    """Return a recipe's raw values with sweeps written out as stages; leave values of wrong shape unchanged."""
    if not isinstance(data, dict) or not isinstance(stages := data.get("stages"), dict):
        return data
    expansion, expanded = _Expansion(stages), data.copy()
    blends, evaluation = data.get("blends"), data.get("evaluation")
    for name in stages:
        expansion.names_of(name)
    if isinstance(blends, dict):
        expanded["blends"] = {name: expansion.made_by(name, blend) for name, blend in blends.items()}
    if isinstance(evaluation, dict) and isinstance(evaluation.get("stages"), list):
        scored = [name for stage in evaluation["stages"] for name in expansion.names.get(str(stage), [stage])]
        expanded["evaluation"] = evaluation | {"stages": scored}
    return expanded | {key: getattr(expansion, key) for key in ("stages", *MADE)}


def _is_start(value: Any) -> bool:
    """Whether a value names variants or checkpoints of a stage."""
    return isinstance(value, dict) and "stage" in value and value.keys() <= ParentChoice.model_fields.keys()


def _listed(by: Any) -> list[Any]:
    return by if isinstance(by, list) else [by]


def _makers(blend: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a blend that name models, with their values."""
    for key in ("source.by", "select.rank.by"):
        value = blend
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            yield key, value


@dataclass
class _Expansion:
    """The stages of a recipe written out, parents first; `names` holds a stage's variants, or the stage."""

    raw: dict[str, Any]
    stages: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    sweeps: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names_of(self, name: str) -> list[str]:
        """Write a stage out and return its variants, or its name without a sweep."""
        if name not in self.names:
            self.names[name] = [name]  # a circle of parents ends here; the recipe's validation refuses it
            self._write_out(name)
        return self.names[name]

    def _write_out(self, name: str) -> None:
        stage = self.raw[name]
        if not isinstance(stage, dict):
            self.stages[name] = stage
            return
        settings = {key: self._named(f"stages.{name}.{key}", value) for key, value in stage.items() if key not in KEYS}
        parents = self._parents(f"stages.{name}.parent", stage.get("parent"))
        points = list(islice(_points(name, stage["sweep"]), MOST_VARIANTS + 1)) if "sweep" in stage else [{}]
        if len(parents) * len(points) > MOST_VARIANTS:
            raise invalid(f"more than {MOST_VARIANTS} variants", f"stages.{name}.sweep")
        labels = _labels(points)
        variants: dict[str, dict[str, Any]] = {}
        for (origin, parent), point in product(parents.items(), points):
            words = [origin, *(f"{labels[key]}-{_text(value)}" for key, value in point.items())]
            variant = ".".join([name, *filter(None, words)])
            if variant in variants:
                raise invalid(f"two variants would be named {variant}; leave one out", f"stages.{name}.sweep")
            laid = settings if parent is None else settings | {"parent": parent}
            for key, value in point.items():
                laid = merge(laid, nested(key, value))
            self.stages[variant] = laid
            variants[variant] = ({"parent": parent} if origin else {}) | point
        self.names[name] = list(variants)
        if [*variants] != [name]:
            self.sweeps[name] = variants
        if "best" in stage:
            if len(variants) == 1:
                raise invalid("there is no sweep to choose the best of; leave it out", f"stages.{name}.best")
            self._choose(name, str(stage["best"]), self.names[name])

    def made_by(self, name: str, blend: Any) -> Any:
        """Return a blend with names of stages, checkpoints or choices in place of the models' starts."""
        for key, by in _makers(blend):
            found = [(start, self._parents(f"blends.{name}.{key}", start)) for start in _listed(by)]
            names = [each or start for start, named in found for each in named.values()]
            blend = merge(blend, nested(key, names if isinstance(by, list) or len(names) > 1 else names[0]))
        return blend

    def _named(self, at: str, value: Any) -> Any:
        """Return a setting with names of stages, checkpoints or choices in place of the starts, but for the parent."""
        if at.endswith(".parent") or not isinstance(value, dict):
            return value
        if not _is_start(value):
            return {key: self._named(f"{at}.{key}", each) if _is_start(each) else each for key, each in value.items()}
        if value.get("each"):
            raise invalid("each: true is for a parent; name one, or say best", at)
        (name,) = self._parents(at, value).values()
        return name

    def _parents(self, at: str, parent: Any) -> dict[str, str | None]:
        """Return the start of each variant by the start's word in the variant's name; a single start has none."""
        if not isinstance(parent, dict):
            if isinstance(parent, str) and parent in self.raw and [parent] != (names := self.names_of(parent)):
                raise invalid(
                    f"{parent} has variants: start from one ({names[0]}), or {{stage: {parent}, each: true}}, or "
                    f"{{stage: {parent}, best: {HELD_OUT_MEAN}}}",
                    at,
                )
            return {"": parent if isinstance(parent, str) else None}
        wanted = _parent_choice(parent, at)
        refuse_misnamed(f"{at}.stage", "stage", wanted.stage, self.raw, self.stages)
        names = self.names_of(wanted.stage) if wanted.stage in self.raw else [wanted.stage]
        steps = wanted.checkpoint if isinstance(wanted.checkpoint, list) else [wanted.checkpoint]
        among = [start for step in steps for start in self._as_of(names, step, at)]
        if wanted.each and wanted.best:
            raise invalid("says each and best; leave one out", at)
        if len(among) == 1:
            if wanted.best:
                raise invalid(f"{wanted.stage} has no variants to choose the best of; leave it out", f"{at}.best")
            return {"": among[0]}
        if wanted.each:
            return {start.removeprefix(f"{wanted.stage}."): start for start in among}
        if wanted.best is None and len(names) > 1:
            raise invalid(f"{wanted.stage} has variants: say each: true, or best: {HELD_OUT_MEAN}", at)
        return {"": self._choose(wanted.stage, wanted.best or HELD_OUT_MEAN, among)}

    def _choose(self, stage: str, by: str, among: list[str]) -> str:
        """Add a choice among variants or checkpoints of a stage; return its name."""
        of = ".checkpoints" if {*among} & self.checkpoints.keys() else ""
        name = f"{stage}{of}.best-{_word(by)}"
        self.choices[name] = {"stage": stage, "by": by, "among": among}
        return name

    def _as_of(self, names: list[str], step: int | None, at: str) -> Iterator[str]:
        """Yield the names of stages as of a step, and have the stages keep the step's checkpoint."""
        for name in names:
            if step is None:
                yield name
                continue
            stage = self.stages.get(name)
            if stage is None:
                raise invalid(f"{name} comes after itself", at)
            kept = {*stage.get("checkpointing", {}).get("keep_steps", []), step}
            self.stages[name] = merge(stage, {"checkpointing": {"keep_steps": sorted(kept)}})
            self.checkpoints[f"{name}.step-{step}"] = {"stage": name, "step": step}
            yield f"{name}.step-{step}"


def _points(name: str, sweep: Any) -> Iterator[dict[str, Any]]:
    """Yield the points of a sweep, a value by key: as listed, or of a grid."""
    at = f"stages.{name}.sweep"
    if isinstance(sweep, list) and sweep and all(isinstance(point, dict) and point for point in sweep):
        yield from sweep
    elif isinstance(sweep, dict) and "draw" in sweep:
        raise invalid("is gone: list the points, as [{seed: 1}, {seed: 2}], or the values of each key", f"{at}.draw")
    elif isinstance(sweep, dict) and sweep and all(isinstance(values, list) and values for values in sweep.values()):
        yield from (dict(zip(sweep, values, strict=True)) for values in product(*sweep.values()))
    else:
        raise invalid("is a list of values for each key, or a list of points", at)


def _labels(points: list[dict[str, Any]]) -> dict[str, str]:
    """Return each key's label in variant names: its last word, or all words where two keys end alike."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: _word(key if ends.count(end) > 1 else end) for key, end in zip(keys, ends, strict=True)}


def _text(value: Any) -> str:
    """Return a value as part of a name."""
    if isinstance(value, float):
        return f"{value:.6g}".replace("+", "")
    if isinstance(value, list | dict):
        return sha256_text(canonical_json(value))[:6]
    return _word(str(value))


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.") or "none"


def _parent_choice(values: Any, at: str) -> ParentChoice:
    try:
        return ParentChoice.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([at, *map(str, filter(None, [*first["loc"], first.get("ctx", {}).get("key")]))])
        raise invalid(first["msg"][0].lower() + first["msg"][1:], place) from None
