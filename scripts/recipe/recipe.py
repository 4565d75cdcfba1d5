"""A recipe: a model's stages, blends and sources.

Settings bear the names and meanings of NeMo-RL (``grpo.num_prompts_per_step``, ``loss_fn.reference_policy_kl_penalty``,
``policy.max_total_sequence_length``, ...), so a stage reads the same for a tiny model here and for NeMo-RL on a
cluster.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from graphlib import CycleError
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from scripts.errors import shortened
from scripts.installed import backend_module, backend_names
from scripts.recipe.blend import (
    AnyBlend,
    Blend,
    GeneratedBlend,
    ImagesBlend,
    PublishedBlend,
    SplitBlend,
    SynthesizedBlend,
)
from scripts.recipe.criteria import BENCHMARKS
from scripts.recipe.environment import Environment
from scripts.recipe.evaluation import Evaluation
from scripts.recipe.expand import HELD_OUT_MEAN, MADE, VALIDATED, CheckpointOf, Choice, expand
from scripts.recipe.fitting import refuse_unmade, refuse_unscored
from scripts.recipe.graph import Graph, RowsNode, Start
from scripts.recipe.model import MODEL, PretrainedModel, RandomModel
from scripts.recipe.source import Source
from scripts.recipe.stage_settings import DEFAULT_BACKEND, StageSettings, Surroundings
from scripts.recipe.strict import Name, Place, Strict, invalid, matching, nearest, refuse_misnamed

_SETTINGS = {name: backend_module(name, "settings") for name in backend_names()}
STAGES: dict[str, dict[str, type[StageSettings]]] = {name: module.STAGES for name, module in _SETTINGS.items()}
TAKEN_STAGES, TAKEN_BLENDS = {"data", "logs", MODEL, "settings", "store"}, {"source", "filled"}
TAKEN_FILES = {
    "alerts.jsonl",
    "compare.html",
    "environments.html",
    "overview.html",
    "report.html",
    "summary.csv",
    "tasks.json",
}
"""Files of a run's folder, next to the stages' folders."""
LONGEST_NAME = 200
"""Characters of a name that becomes a file's name; file systems allow 255 bytes, and suffixes come on top."""
REPEATED = re.compile(r"(.{1,10}?)\1{19}")
"""Snakemake refuses a wildcard's value that repeats a piece twenty times."""
ALGORITHMS = tuple(dict.fromkeys(algorithm for models in STAGES.values() for algorithm in models))


_TAGS = {  # what pydantic calls each model of a stage; in angle brackets, which no key has
    model: f"<{backend}>"
    if len({*models.values()}) == 1
    else f"<{algorithm if backend == DEFAULT_BACKEND else f'{backend}.{algorithm}'}>"
    for backend, models in STAGES.items()
    for algorithm, model in models.items()
}


def _tag_of(stage: Any) -> str | None:
    """Return the tag of a stage's model, by backend and algorithm."""
    get = stage.get if isinstance(stage, dict) else lambda key: getattr(stage, key, None)
    backend, algorithm = get("backend") or DEFAULT_BACKEND, get("algorithm")
    models = STAGES.get(backend if isinstance(backend, str) else "", STAGES[DEFAULT_BACKEND])
    if len({*models.values()}) == 1:
        return _TAGS[next(iter(models.values()))]
    return _TAGS[models[algorithm]] if isinstance(algorithm, str) and algorithm in models else algorithm


AnyStage = Annotated[
    Union[tuple(Annotated[model, Tag(tag)] for model, tag in _TAGS.items())],  # noqa: UP007
    Discriminator(_tag_of),
]


def _kind_of_model(model: Any) -> str:
    """Return the tag of a recipe's model, which is pretrained unless a width is given."""
    widths = RandomModel.model_fields.keys() - PretrainedModel.model_fields.keys()
    is_random = isinstance(model, RandomModel) or (isinstance(model, dict) and model.keys() & widths)
    return "<random>" if is_random else "<pretrained>"


class Recipe(Strict):
    """A model's stages, blends and sources; ``defaults`` holds settings shared by the stages of an algorithm."""

    gone = dict.fromkeys(("proves", "next_rung"), "leave it out; docs/recipes.md has the ladder of the shipped recipes")

    name: Name
    description: str = ""
    seed: int | None = None
    """Of data and training; none: 0, and in NeMo-RL its config's."""
    license: matching(r"^[a-z0-9][a-z0-9.-]*$") | None = None
    """Of the trained models, by the hub's name of it, for their cards; none: the cards state none."""
    release: Name | None = None
    """Of NeMo-RL, by its name in envs/nemo-rl.yaml."""
    note: str | None = None
    """A note before training, shown by doctor and plan."""
    source: Annotated[Source, Field(discriminator="kind")]
    tables: dict[str, str] = Field({})
    """Revision, by dataset repository, of the external tables of placeholder rows; none: main."""
    model: Annotated[
        Annotated[RandomModel, Tag("<random>")] | Annotated[PretrainedModel, Tag("<pretrained>")],
        Discriminator(_kind_of_model),
    ]
    models: dict[Name, PretrainedModel] = Field({})
    """More pretrained models, for stages to name as teachers or reward models; `model` is the name of the recipe's."""
    environments: dict[Name, Place] = Field({})
    """Environments of yours: by name, the Python file with functions that reward rows of the name."""
    blends: dict[Name, AnyBlend]
    evaluation: Evaluation | None = None
    """None: no held-out scores; the loss on held-out rows and the stages' metrics judge."""
    defaults: dict[Literal[ALGORITHMS], dict[str, Any]] = Field({})
    start: Name | None = None
    """The stage to start from the model; earlier stages are left out. None: all stages stay."""
    stages: dict[Name, AnyStage] = Field(min_length=1)
    sweeps: SkipJsonSchema[dict[Name, dict[Name, dict[str, Any]]]] = Field({})
    checkpoints: SkipJsonSchema[dict[Name, CheckpointOf]] = Field({})
    choices: SkipJsonSchema[dict[Name, Choice]] = Field({})
    left_out: SkipJsonSchema[tuple[Name, ...]] = ()
    """The stages that `start` leaves out."""

    @cached_property
    def graph(self) -> Graph:
        """The nodes: pretrained models, stages, checkpoints, choices and rows."""
        return Graph(
            stages=self.stages,
            checkpoints=self.checkpoints,
            choices=self.choices,
            sweeps=self.sweeps,
            models=self.models | self.model.as_start,
            blends=self.blends,
            evaluation=self.evaluation,
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Recipe":
        """Return a copy with other values, whose graph is made of these."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("graph", None)
        return copied

    @model_validator(mode="before")
    @classmethod
    def _expand_sweeps(cls, data: Any) -> Any:
        for key in (*MADE, "left_out"):
            if isinstance(data, dict) and key in data:
                raise invalid("is made of sweeps and of what parents name; leave it out", key)
        return expand(data)

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        for name, blend in self.generated.items():
            refuse_unmade(self.graph, name)
            prompts = self.graph.rows(name).lineage[-1].blend
            self.blends[name] = blend.with_environments(prompts.environments)
        self._names_refer()
        self._sources_fit()
        for name, stage in self.stages.items():
            stage.check_in(self.around(name))
        self._environments_fit()
        refuse_unscored(self.graph)
        self._scores_are_taken()
        self._names_are_free()
        return self._started()

    def around(self, name: str) -> Surroundings:
        """Return what is around a stage, against which its settings are checked."""
        node = self.graph[name]
        rows, parents = node.rows, node.parents
        return Surroundings(
            name=name,
            release=self.release,
            model=self.model,
            blend=rows[0].blend if rows else None,
            is_fresh=not node.origin,
            parent=parents[0].settings if parents else None,
            continued=tuple(start.settings for start in node.continued),
            roles={role: start.settings for role, start in node.roles.items()},
        )

    def _names_are_free(self) -> None:
        """Refuse names that the results folder uses itself, and names that no file can have."""
        taken = TAKEN_STAGES | TAKEN_FILES
        taken_of = {"stages": taken, "models": taken | self.stages.keys(), "blends": TAKEN_BLENDS}
        for at, names in taken_of.items():
            for name in names & getattr(self, at).keys():
                what = name if name in TAKEN_FILES else f"{name}/"
                raise invalid(f"the results folder has a {what} of its own; choose another name", f"{at}.{name}")
        for at in (*taken_of, "checkpoints", "choices", "sweeps"):
            for name in getattr(self, at):
                self._names_a_file(at, name)

    def _names_a_file(self, at: str, name: str) -> None:
        """Refuse a name that is too long for a file, or that Snakemake refuses in a path."""
        key = f"{at}.{shortened(name, 40)}"
        if len(name) > LONGEST_NAME:
            raise invalid(f"has {len(name)} characters; a name has at most {LONGEST_NAME}, as it names files", key)
        if repeated := REPEATED.search(name):
            raise invalid(f"repeats {repeated[1]!r} twenty times, which Snakemake refuses in the name of a file", key)

    def _started(self) -> "Recipe":
        """Return the recipe whose stage `start` starts from the model.

        Left out are the ancestors of `start` but for the stages in its other roles, their descendants beside `start`,
        and the blends of left-out stages alone, unless held-out scores need them.
        """
        if self.start is None:
            return self
        starts = {*self.sweeps.get(self.start, [self.start])}
        refuse_misnamed("start", "stage", self.start, self.stages, self.sweeps)
        fresh = {start: self.stages[start].model_copy(update={"parent": None, "continues": None}) for start in starts}
        recipe = self.model_copy(update={"stages": self.stages | fresh})
        # What the starts need no longer, and what needs that by another way than through a start.
        before = set().union(*(self._trained_for(start) - recipe._trained_for(start) for start in starts))
        stages = {name: each for name, each in recipe.stages.items() if not before & recipe._trained_for(name)}
        left_out = tuple(stage.name for stage in self.graph.order if stage.name not in stages)
        checkpoints = {name: each for name, each in self.checkpoints.items() if each.stage in stages}
        used = {*self.graph.scored_rows, *self._rows_behind(stages)}
        unused = {rows.name for rows in self._rows_behind(left_out) - used}
        left = {
            "stages": stages,
            "blends": {name: blend for name, blend in self.blends.items() if name not in unused},
            "sweeps": {name: sweep for name, sweep in self.sweeps.items() if sweep.keys() <= stages.keys()},
            "checkpoints": checkpoints,
            "choices": {name: each for name, each in self.choices.items() if {*each.among} <= {*stages, *checkpoints}},
            "left_out": left_out,
        }
        recipe = self.model_copy(update=left)
        for start in starts:
            stages[start].check_in(recipe.around(start))
        return recipe

    def _trained_for(self, name: str) -> set[str]:
        """Return a stage with the stages, checkpoints and choices that it needs."""
        return {start.name for start in self.graph[name].lineage if start.trained}

    def _rows_behind(self, stages: Iterable[str]) -> set[RowsNode]:
        """Return the rows that stages train on, with the rows of their prompts."""
        return {each for stage in stages for rows in self.graph[stage].rows for each in rows.lineage}

    @property
    def card_facts(self) -> dict[str, str]:
        """What the recipe tells the model cards, by the option of `scripts.report.card`."""
        said = {name: getattr(self.model, name, None) for name in ("base_model", "attribution")}
        return {name: value for name, value in ({"license": self.license} | said).items() if value}

    def _names_refer(self) -> None:
        for name, stage in self.stages.items():
            trained = {start.name for start in self.graph.trained}
            refuse_misnamed(f"stages.{name}.parent", "stage", stage.parent, self.stages, trained)
            for parent in self.graph[name].parents:
                if stage.answers_prompts and not parent.settings.answers_prompts:
                    says = "is a reward model, which answers no prompts; start from the stage's own parent"
                    raise invalid(f"{parent.name} {says}", f"stages.{name}.parent")
            for role, start in stage.roles.items():
                refuse_misnamed(f"stages.{name}.{role}", "stage or model", start, self.graph.known, self.graph.names)
            for before in self.graph[name].continued:
                self._goes_on(name, stage, before)
            if stage.kind is None:
                continue
            refuse_misnamed(f"stages.{name}.blend", "blend", stage.blend, self.blends)
            blend = self.blends[stage.blend]
            if blend.kind != stage.kind:
                says = f"{stage.algorithm} trains on {stage.kind}, but blend {stage.blend} holds {blend.kind}"
                raise invalid(says, f"stages.{name}.blend")
            left, taken = blend.rows_to_train, stage.rows_per_step
            if left is not None and 0 < left < taken:
                raise invalid(f"has {left} rows to train on, but a step takes {taken}", f"stages.{name}.blend")
        self._checkpoints_are_reached()
        try:
            _ = self.graph.order
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise invalid(f"the stages start from each other: {cycle}", "stages") from None

    def _checkpoints_are_reached(self) -> None:
        """Refuse an earlier checkpoint that its stage never comes to, or may never come to."""
        for checkpoint in self.checkpoints.values():
            stage, at = self.stages[checkpoint.stage], f"stages.{checkpoint.stage}"
            if stage.stopping is not None:
                says = f"stop_when may end it before step {checkpoint.step}, which another stage names; leave one out"
                raise invalid(says, at)
            last = stage.planned_step(None)
            if last is not None and checkpoint.step > last:
                raise invalid(f"has no step {checkpoint.step}, its last is {last}", at)

    def _goes_on(self, name: str, stage: StageSettings, before: Start) -> None:
        """Refuse a stage that cannot go on with the optimizer or the steps of the stage that it continues."""
        at, then = f"stages.{name}.continues", before.settings.kept_by_continuing
        for key, value in stage.kept_by_continuing.items():
            if then.get(key) != value:
                raise invalid(f"{before.name} cannot be continued: its {key} is {then.get(key)}, not {value}", at)
        begun, last = before.last_step(before.settings.planned_step(None)), stage.planned_step(None)
        if begun is not None and last is not None and last <= begun:
            says = f"begins after step {begun} of {before.name}, which max_num_steps ({last}) counts too"
            raise invalid(says, at)

    def _sources_fit(self) -> None:
        if getattr(self.source, "subset", None) or getattr(self.source, "split", None):
            raise invalid("subset and split are of a blend's own source; name the source there", "source")
        for name, blend in self.blends.items():
            blend.check_source(self.source, f"blends.{name}")

    @property
    def published(self) -> dict[str, PublishedBlend | ImagesBlend]:
        """The blends whose rows are fetched, by name."""
        return self._blends_of(PublishedBlend, ImagesBlend)

    @property
    def synthesized(self) -> dict[str, SynthesizedBlend]:
        """The blends whose rows are written on this machine, by name."""
        return self._blends_of(SynthesizedBlend)

    @property
    def images(self) -> dict[str, ImagesBlend]:
        """The blends of images, by name."""
        return self._blends_of(ImagesBlend)

    @property
    def split_here(self) -> dict[str, SplitBlend]:
        """The blends of rows in JSONL, which are split and checked here, by name."""
        return self._blends_of(SplitBlend)

    @property
    def generated(self) -> dict[str, GeneratedBlend]:
        """The blends whose rows models make, by name."""
        return self._blends_of(GeneratedBlend)

    @property
    def fetched(self) -> dict[str, PublishedBlend | ImagesBlend | SynthesizedBlend]:
        """The blends whose rows are published or synthesized, by name; models make the others."""
        return self._blends_of(PublishedBlend, ImagesBlend, SynthesizedBlend)

    def _blends_of(self, *kinds: type[Blend]) -> dict[str, Any]:
        """Return the blends of some kinds by name."""
        return {name: blend for name, blend in self.blends.items() if isinstance(blend, kinds)}

    def _environments_fit(self) -> None:
        rewarded_here = [stage.blend for stage in self.stages.values() if stage.is_rewarded_here]
        elsewhere = {stage.blend for stage in self.stages.values()} - {*rewarded_here}
        for name, blend in self.blends.items():
            if not rewarded_here or name in elsewhere:
                continue
            if blend.lists_environments:
                at, known = f"blends.{name}.environments", [*Environment, *self.environments]
                if not blend.environments:
                    says = "is missing: the names of what rewards the rows, such as [math_with_judge_simple_agent]"
                    raise invalid(says, at)
                for place, each in enumerate(blend.environments):
                    if each not in known:
                        raise invalid(f"'{each}' is not known{nearest(each, known)}", f"{at}.{place}")
            if blend.has_pictures and not self.model.may_see:
                raise invalid("the model has no vision, by which it would see them", f"blends.{name}.pictures")
        if self.environments and not rewarded_here:
            raise invalid("NeMo-RL's environments are NeMo-Gym's; leave them out", "environments")
        for name in self.environments.keys() & {*Environment}:
            raise invalid("an environment has this name already; choose another", f"environments.{name}")

    def _scores_are_taken(self) -> None:
        tasks = [task.task for task in self.evaluation.task_list] if self.evaluation else []
        for name, stage in self.stages.items():
            for place, criterion in enumerate(stage.gate):
                at = f"stages.{name}.gate.{place}"
                if criterion.metric in BENCHMARKS and not tasks:
                    raise invalid("the evaluation has no tasks or benchmarks", f"{at}.metric")
                if criterion.metric in BENCHMARKS and not stage.answers_prompts:
                    raise invalid("is of tasks, whose prompts a reward model does not answer", f"{at}.metric")
                if criterion.metric in BENCHMARKS:
                    refuse_misnamed(f"{at}.benchmark", "benchmark", criterion.benchmark, tasks)
        for choice in self.choices.values():
            at = f"stages.{choice.stage}"
            if choice.by == "worst_environment_change":
                says = f"choose by {HELD_OUT_MEAN}, and bound {choice.by} in the stage's gate"
                raise invalid(f"best: {choice.by} is gone: {says}, which leaves out what it stops", at)
            refuse_misnamed(at, "score", choice.by, [HELD_OUT_MEAN, *VALIDATED, *tasks])
            candidates = self.graph.starts_of(choice.among)
            if choice.by in VALIDATED:
                self._is_validated(choice, at)
            elif choice.by not in tasks and not all(candidate.is_scored for candidate in candidates):
                more = "; say best: validation_loss" if candidates[0].settings.validates else ""
                raise invalid(f"gets no held-out scores, by which the best is to be chosen{more}", at)

    def _is_validated(self, choice: Choice, at: str) -> None:
        """Refuse a choice by a figure of held-out rows that a candidate does not have."""
        for candidate in self.graph.starts_of(choice.among):
            stage = candidate.settings
            known = [] if not stage.validates else ["validation_loss", *stage.figures]
            if choice.by not in known:
                has = ", ".join(known) or "none"
                raise invalid(f"measures no {choice.by} of held-out rows, by which to choose (it has: {has})", at)
            if not stage.section.val_at_end and stage.stopping is None:
                raise invalid(f"{choice.by} is of the checkpoint; leave {stage.algorithm}.val_at_end true", at)

    def seed_of(self, name: str) -> int | None:
        """Return the seed of a stage's training; None: the seed of the backend's config."""
        stage = self.stages[name]
        return next((seed for seed in (stage.seed, self.seed) if seed is not None), stage.default_seed)
