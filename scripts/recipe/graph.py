"""A recipe as a graph of nodes, each of which answers for itself.

A start is whatever a stage starts from, learns from or samples from: a stage, a checkpoint of a stage, a choice among
stages or checkpoints, or a pretrained model. It has a folder of the run's results with an export. Rows are a blend,
with the blends and the starts that its rows are made from. Whoever has a node never asks what kind of node it is: the
kinds answer the same questions, and one without an answer gives none (no settings, no files, nothing before it).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any, ClassVar

from scripts.recipe.blend import OPTIONAL_FILES, TEST_SPLIT, Blend
from scripts.recipe.criteria import BENCHMARKS
from scripts.recipe.evaluation import Evaluation
from scripts.recipe.expand import CheckpointOf, Choice
from scripts.recipe.generated import GeneratedSource
from scripts.recipe.model import MODEL, PretrainedModel
from scripts.recipe.stage_settings import StageSettings

EXPORT = "hf/record.json"
"""The record of a start's export, below its folder."""
TASK_SCORES = "benchmarks.json"
"""The scores of an export on the recipe's tasks, below its folder."""


@dataclass(frozen=True, eq=False)
class Node:
    """A folder of a run's results. `graph` holds the other nodes, and `name` is the node's within its kind."""

    graph: "Graph" = field(repr=False)
    name: str

    @property
    def folder(self) -> str:
        """The folder below the results."""
        return self.name

    def has(self, file: str) -> bool:
        """Whether the folder comes to hold a file, by its path below the folder."""
        return True

    def files(self, *names: str) -> list[str]:
        """Return the paths below the results of those of the files that the folder comes to hold."""
        return [f"{self.folder}/{name}" for name in names if self.has(name)]

    @property
    def itself(self) -> tuple["Node", ...]:
        """The node, for those who ask for nodes."""
        return (self,)


@dataclass(frozen=True, eq=False)
class ShardNode(Node):
    """A part of the responses that a blend's rows are selected from; its files differ in their suffixes."""

    @property
    def folder(self) -> str:
        """The path of the files without their suffixes, below the results."""
        return f"data/{self.name}"

    def files(self, *names: str) -> list[str]:
        """Return the paths below the results of the files with suffixes."""
        return [f"{self.folder}{suffix}" for suffix in names]


@dataclass(frozen=True, eq=False)
class RowsNode(Node):
    """The rows of a blend: published or synthesized, or made by models from the prompts of another blend."""

    @property
    def blend(self) -> Blend:
        """The settings of the blend."""
        return self.graph.blends[self.name]

    @property
    def folder(self) -> str:
        """The folder of the splits, below the results."""
        return f"data/{self.name}"

    def has(self, file: str) -> bool:
        """Whether the folder comes to hold a file: all but another format's images, and test rows by the blend."""
        return file not in OPTIONAL_FILES or file in self.blend.optional_files

    @property
    def prompts(self) -> tuple["RowsNode", ...]:
        """The rows that models respond to; none of rows that are published or synthesized."""
        return self.graph.rows_of(*self.blend.prompts)

    @property
    def models(self) -> tuple["Start", ...]:
        """The starts that respond to the prompts."""
        return self.graph.starts_of(self.blend.models)

    @property
    def rankers(self) -> tuple["Start", ...]:
        """The reward model that ranks the responses, where one does."""
        return self.graph.starts_of(self.blend.rankers)

    @property
    def makers(self) -> tuple["Start", ...]:
        """The starts that make and rank these rows, each once; without those that make the prompts."""
        return self.graph.starts_of(self.blend.makers)

    @property
    def lineage(self) -> tuple["RowsNode", ...]:
        """These rows, the rows of their prompts, and so on, each once."""
        found, prompts = [self], self.prompts
        while prompts and prompts[0] not in found:
            found.append(prompts[0])
            prompts = prompts[0].prompts
        return tuple(found)

    @property
    def made_by(self) -> tuple["Start", ...]:
        """The starts that make these rows, and the prompts of these rows, each once."""
        makers = [maker for rows in self.lineage for maker in rows.makers]
        return tuple(dict.fromkeys(makers))

    @property
    def judging(self) -> GeneratedSource | Evaluation:
        """Whose `gym` and `gym_servers` judge the responses: the blend's own, else those of the held-out scores."""
        source, evaluation = self.blend.source, self.graph.evaluation
        return source if source.gym or not evaluation else evaluation

    @property
    def servers_elsewhere(self) -> dict[str, str]:
        """The revisions, or else addresses, of Gym's servers that judge the responses and run elsewhere, by name."""
        reached = sorted(self.judging.gym_servers.items())
        return {name: server.revision or server.base_url for name, server in reached if server.base_url}

    @property
    def shards(self) -> tuple["ShardNode", ...]:
        """The parts in which models respond to the prompts; none of rows that are published or synthesized."""
        count = self.blend.shards
        names = [f"{self.name}/generated/samples/{number}-of-{count}" for number in range(1, count + 1)]
        return tuple(ShardNode(self.graph, name) for name in names)

    @property
    def held_out(self) -> tuple["RowsNode", ...]:
        """The rows with validation splits whose prompts may not come in: the prompts', and those all stages answer."""
        return tuple(dict.fromkeys((*self.prompts, *self.graph.scored_rows)))

    @property
    def held_out_tests(self) -> tuple["RowsNode", ...]:
        """The rows with test splits whose prompts may not come in."""
        tested = self.graph.tested_rows if self.graph.ends else ()
        return tuple(dict.fromkeys((*self.prompts, *tested)))


@dataclass(frozen=True, eq=False)
class Start(Node):
    """Whatever a stage starts from, learns from or samples from."""

    @property
    def settings(self) -> StageSettings | None:
        """The settings of the training: of a choice the first candidate's. None of what no stage trains."""
        return None

    @property
    def is_scored(self) -> bool:
        """Whether the start gets held-out scores of its own."""
        return False

    @property
    def before(self) -> tuple["Start", ...]:
        """The starts that are made first, the parent or the model first, then the roles', then the rows' makers."""
        return ()

    @property
    def parents(self) -> tuple["Start", ...]:
        """The start whose weights are trained on, where the recipe names one."""
        return ()

    @property
    def stage(self) -> str:
        """The name of the stage that trains it; for what no stage trains its own."""
        return self.name

    @property
    def lineage(self) -> frozenset["Start"]:
        """The start with all that is made before it."""
        found, left = set[Start](), [self]
        while left:
            start = left.pop()
            if start not in found:
                found.add(start)
                left.extend(start.before)
        return frozenset(found)

    @property
    def alternatives(self) -> tuple["Start", ...]:
        """The start, or the candidates of a choice."""
        return self.itself

    def last_step(self, trained: int | None) -> int | None:
        """Return the step of the weights, by the last step of the training (None: unknown)."""
        return trained

    @property
    def trained(self) -> frozenset[str]:
        """The names of the stages whose training makes it; none of a pretrained model."""
        return self.trained_before

    @property
    def trained_before(self) -> frozenset[str]:
        """The names of the stages whose training directly comes before it, all candidates' of a choice."""
        trained = [start.trained for start in self.before]
        return frozenset().union(*trained)

    @property
    def is_scored_itself(self) -> bool:
        """Whether jobs take held-out scores of the export; a choice has the scores of a candidate."""
        return self.is_scored

    @property
    def scored(self) -> tuple["Start", ...]:
        """The start, where it gets held-out scores."""
        return self.itself if self.is_scored else ()

    @property
    def scores_before(self) -> tuple["Start", ...]:
        """The start whose scores are those before it: the parent, or the recipe's pretrained model."""
        return ()


@dataclass(frozen=True, eq=False)
class ModelNode(Start):
    """A pretrained model of the hub or of a folder."""

    @property
    def model(self) -> PretrainedModel:
        """The settings of the model."""
        return self.graph.models[self.name]

    @property
    def title(self) -> str:
        """The words for the model in a sentence about a stage."""
        return f"its model {self.name}"

    def has(self, file: str) -> bool:
        """Whether the folder comes to hold a file: an export."""
        return file == EXPORT


@dataclass(frozen=True, eq=False)
class OwnModelNode(ModelNode):
    """The recipe's own pretrained model, from which stages without a parent start."""

    @property
    def title(self) -> str:
        """The words for the model in a sentence about a stage."""
        return "its model"

    def has(self, file: str) -> bool:
        """Whether the folder comes to hold a file: an export, and scores on tasks."""
        return super().has(file) or (file == TASK_SCORES and self.graph.has_tasks)


@dataclass(frozen=True, eq=False)
class Trained(Start):
    """A start that stages train: its folder has a checkpoint, a gate and scores as well."""

    QUANTIZED_SCORES: ClassVar[tuple[str, ...]] = ()
    """The scores that a quantised export gets too, where there is one."""

    @cached_property
    def _lacking(self) -> frozenset[str]:
        """The files that other trained starts have, and this one has not."""
        has_task_scores = self.graph.has_tasks and self.settings.answers_prompts
        has = {
            "rollouts.parquet": self.is_scored,
            "eval.json": self.is_scored or self.settings.validates,
            "test.json": self in self.graph.ends,
            TASK_SCORES: has_task_scores,
        }
        scores = self.QUANTIZED_SCORES if self.settings.quantize else ()
        has["quantized/eval.json"] = self.is_scored and "eval.json" in scores
        has[f"quantized/{TASK_SCORES}"] = has_task_scores and TASK_SCORES in scores
        return frozenset(file for file, is_there in has.items() if not is_there)

    def has(self, file: str) -> bool:
        """Whether the folder comes to hold a file: all but the scores that it does not get."""
        return file not in self._lacking

    @property
    def parents(self) -> tuple[Start, ...]:
        """The start whose weights are trained on, where the recipe names one."""
        parent = self.settings.parent
        return self.graph.starts_of([parent] if parent else ())

    @property
    def model(self) -> tuple[Start, ...]:
        """The recipe's pretrained model, where the training starts from it."""
        starts_from_it = self.settings.takes_model and not self.parents
        return self.graph.own_model if starts_from_it else ()

    @property
    def origin(self) -> tuple[Start, ...]:
        """The start whose export the training starts from; none where it makes its model."""
        return self.parents or self.model

    @property
    def continued(self) -> tuple[Start, ...]:
        """The parent, where the training goes on with the parent's optimizer, schedule and count of steps."""
        continues = self.settings.continues
        return self.graph.starts_of([continues] if continues else ())

    @property
    def early_steps(self) -> tuple[int, ...]:
        """The step of the weights, where the training goes on after that step."""
        return ()

    @property
    def is_resolved(self) -> bool:
        """Whether the config follows from the recipe; a choice has a published config."""
        return True

    @property
    def why_not_again(self) -> str:
        """Why no call trains it again, in words; empty where a call does."""
        return ""

    @property
    def trains(self) -> tuple["StageNode", ...]:
        """The stage of the same name; none of a checkpoint or choice."""
        return ()

    @property
    def draws_by_seed(self) -> bool:
        """Whether the weights follow from the seed: whether anything but a model's dropout is drawn."""
        settings = [parent.settings for parent in self.parents]
        return self.settings.draws_by_seed(not self.origin, *settings)

    @property
    def roles(self) -> dict[str, Start]:
        """The starts besides the parent, by role: teachers, a reward model, what is merged."""
        return {role: self.graph[name] for role, name in self.settings.roles.items()}

    @property
    def others(self) -> tuple[Start, ...]:
        """The starts besides the parent."""
        return tuple(self.roles.values())

    @property
    def starts(self) -> tuple[Start, ...]:
        """The starts that the recipe names, the parent first, each once."""
        return tuple(dict.fromkeys((*self.parents, *self.others)))

    @property
    def rows(self) -> tuple[RowsNode, ...]:
        """The rows that are trained on; none of a merge."""
        blend = self.settings.blend
        return self.graph.rows_of(*([blend] if blend else ()))

    @property
    def makers(self) -> tuple[Start, ...]:
        """The starts that make the rows."""
        return tuple(maker for rows in self.rows for maker in rows.made_by)

    @property
    def foreign(self) -> tuple[Start, ...]:
        """The parent, where another backend trains it."""
        return tuple(parent for parent in self.parents if parent.settings.backend != self.settings.backend)

    @property
    def stage_node(self) -> tuple[Start, ...]:
        """The node of the stage whose training makes it."""
        return self.itself

    @property
    def waits_for(self) -> tuple[Start, ...]:
        """The stage whose training a checkpoint waits for."""
        return ()

    @property
    def measured(self) -> tuple[Start, ...]:
        """The start, where held-out rows measure it: prompts or written answers."""
        return self.itself if self.has("eval.json") else ()

    @property
    def judged_on_tasks(self) -> tuple[Start, ...]:
        """The start, where its gate judges by scores on tasks."""
        metrics = {criterion.metric for criterion in self.settings.gate}
        return self.itself if metrics & {*BENCHMARKS} else ()

    @property
    def scores_before(self) -> tuple[Start, ...]:
        """The start whose scores are those before it: the parent or a merge's part, or the recipe's model."""
        before = self.settings.before
        return self.graph.starts_of([before]) if before else self.model

    @property
    def scored_before(self) -> tuple[Start, ...]:
        """The start whose held-out scores are those before it, where it gets scores of its own."""
        return tuple(start for start in self.scores_before if start.is_scored)

    @property
    def unscored_before(self) -> tuple[Start, ...]:
        """The start before it that gets no scores of its own, so that it is scored next to this one."""
        return tuple(start for start in self.scores_before if not start.is_scored)

    @property
    def fresh(self) -> tuple[Start, ...]:
        """The start itself, where the scores before it are of the model that its config describes."""
        return () if self.scores_before else self.itself

    @property
    def root(self) -> "Trained":
        """The first of the chain of scores: what has a pretrained or a fresh model before it."""
        root = self
        while trained := [start for start in root.scores_before if start.trained]:
            root = trained[0]
        return root

    @property
    def root_model(self) -> tuple[Start, ...]:
        """The pretrained model at the beginning of the chain of scores."""
        return self.root.scores_before

    @property
    def root_fresh(self) -> tuple[Start, ...]:
        """The first of the chain of scores, where its config describes the model at the beginning."""
        return self.root.fresh


@dataclass(frozen=True, eq=False)
class StageNode(Trained):
    """A stage of the recipe, a variant of a sweep or a merge included."""

    QUANTIZED_SCORES = ("eval.json", TASK_SCORES)

    @property
    def settings(self) -> StageSettings:
        """The settings of the stage."""
        return self.graph.stages[self.name]

    @property
    def before(self) -> tuple[Start, ...]:
        """The starts that are made first."""
        return tuple(dict.fromkeys((*self.origin, *self.others, *self.makers)))

    @property
    def trained(self) -> frozenset[str]:
        """The stage's name."""
        return frozenset({self.name})

    @property
    def trains(self) -> tuple["StageNode", ...]:
        """The stage."""
        return (self,)

    @property
    def is_scored(self) -> bool:
        """Whether transformers samples responses to held-out prompts from the export."""
        evaluation = self.graph.evaluation
        if evaluation is None or evaluation.max_new_tokens is None or not self.settings.answers_prompts:
            return False
        return self.name in evaluation.stages if evaluation.stages else not self.settings.is_converted


@dataclass(frozen=True, eq=False)
class CheckpointNode(Trained):
    """A stage as of an earlier step."""

    QUANTIZED_SCORES = ("eval.json",)

    @property
    def checkpoint(self) -> CheckpointOf:
        """The stage and the step."""
        return self.graph.checkpoints[self.name]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.step

    @property
    def early_steps(self) -> tuple[int, ...]:
        """The step of the checkpoint."""
        return (self.step,)

    def last_step(self, trained: int | None) -> int | None:
        """Return the step of the checkpoint, or the last step of a training that ends before."""
        return self.step if trained is None else min(trained, self.step)

    @property
    def why_not_again(self) -> str:
        """The stage to train again."""
        return f"is a checkpoint of {self.stage}, and again={self.stage} trains it again"

    @property
    def stage(self) -> str:
        """The name of the stage whose training makes it."""
        return self.checkpoint.stage

    @property
    def before(self) -> tuple[Start, ...]:
        """The stage."""
        return self.graph.starts_of([self.stage])

    @property
    def stage_node(self) -> tuple[Start, ...]:
        """The node of the stage."""
        return self.before

    @property
    def waits_for(self) -> tuple[Start, ...]:
        """The stage, whose training the checkpoint waits for."""
        return self.before

    @property
    def settings(self) -> StageSettings:
        """The settings of the stage."""
        return self.graph.stages[self.stage]

    @property
    def is_scored(self) -> bool:
        """Whether the stage gets held-out scores."""
        return self.before[0].is_scored


@dataclass(frozen=True, eq=False)
class ChoiceNode(Trained):
    """The best of a stage's variants or checkpoints by a score; its folder has the files of the one that is chosen."""

    @property
    def choice(self) -> Choice:
        """The stage, the score and the candidates."""
        return self.graph.choices[self.name]

    @property
    def before(self) -> tuple[Start, ...]:
        """The candidates."""
        return self.graph.starts_of(self.choice.among)

    @property
    def alternatives(self) -> tuple[Start, ...]:
        """The candidates."""
        return self.before

    @property
    def is_resolved(self) -> bool:
        """No: the chosen candidate has the config."""
        return False

    @property
    def is_scored_itself(self) -> bool:
        """No: the chosen candidate has the scores."""
        return False

    @property
    def why_not_again(self) -> str:
        """The candidates to train again."""
        return f"is chosen and not trained; name what it is chosen from: {', '.join(self.choice.among)}"

    @property
    def settings(self) -> StageSettings:
        """The settings of the first candidate."""
        return self.before[0].settings

    @property
    def is_scored(self) -> bool:
        """Whether the candidates get held-out scores."""
        return self.before[0].is_scored


@dataclass
class Graph:
    """The nodes of a recipe. Each is made when it is asked for, so that a recipe with mistakes can be asked too.

    The parts are the recipe's own, by name; `models` are all pretrained models, the recipe's own among them as `model`.
    """

    stages: Mapping[str, StageSettings]
    checkpoints: Mapping[str, CheckpointOf]
    choices: Mapping[str, Choice]
    sweeps: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, PretrainedModel]
    blends: Mapping[str, Blend]
    evaluation: Evaluation | None = None
    _starts: dict[str, Start] = field(default_factory=dict)
    _rows: dict[str, RowsNode] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Start:
        """Return a start; KeyError for a name that is none."""
        if name not in self._starts:
            self._starts[name] = self._made(name)
        return self._starts[name]

    def _made(self, name: str) -> Start:
        kinds = (
            (ChoiceNode, self.choices),
            (CheckpointNode, self.checkpoints),
            (StageNode, self.stages),
            (OwnModelNode, self.models.keys() & {MODEL}),
            (ModelNode, self.models),
        )
        for kind, named in kinds:
            if name in named:
                return kind(self, name)
        raise KeyError(name)

    def rows(self, blend: str) -> RowsNode:
        """Return the rows of a blend; KeyError for an unknown one."""
        if blend not in self._rows:
            if blend not in self.blends:
                raise KeyError(blend)
            self._rows[blend] = RowsNode(self, blend)
        return self._rows[blend]

    def starts_of(self, names: Iterable[str]) -> tuple[Start, ...]:
        """Return starts by name, in the order of the names."""
        return tuple(self[name] for name in names)

    def rows_of(self, *blends: str) -> tuple[RowsNode, ...]:
        """Return the rows of blends, without blends that the recipe has not."""
        return tuple(self.rows(blend) for blend in blends if blend in self.blends)

    @property
    def own_model(self) -> tuple[Start, ...]:
        """The recipe's own pretrained model, where it has one."""
        return self.starts_of(self.models.keys() & {MODEL})

    @property
    def known(self) -> list[str]:
        """The names by which users know starts: of stages and of pretrained models."""
        return [*self.stages, *self.models]

    @property
    def names(self) -> set[str]:
        """The names of all starts."""
        return {*self.stages, *self.checkpoints, *self.choices, *self.models}

    @property
    def trained(self) -> tuple[Trained, ...]:
        """The stages, checkpoints and choices, in the recipe's order."""
        return self.starts_of((*self.stages, *self.checkpoints, *self.choices))

    @cached_property
    def continued(self) -> frozenset[str]:
        """The names of the starts whose training another stage goes on with."""
        return frozenset(before.name for start in self.trained for before in start.continued)

    @cached_property
    def _in_order(self) -> tuple[Trained, ...]:
        """The stages, checkpoints and choices, each after what it needs; CycleError for a cycle."""
        needs = {}
        for start in self.trained:
            needs[start.name] = [each.name for each in start.before if each.trained]
        return self.starts_of(TopologicalSorter(needs).static_order())

    @cached_property
    def order(self) -> tuple[StageNode, ...]:
        """The stages, each after those that it needs, otherwise in the recipe's order; CycleError for a cycle."""
        return tuple(stage for start in self._in_order for stage in start.trains)

    @property
    def stage_names(self) -> list[str]:
        """The names of the stages, in order."""
        return [stage.name for stage in self.order]

    @property
    def jobs(self) -> tuple[Trained, ...]:
        """What training jobs publish: the stages in order, then the checkpoints."""
        return (*self.order, *self.starts_of(self.checkpoints))

    def descendants(self, start: Start) -> tuple[StageNode, ...]:
        """Return the stages that have a start in their lineage, in order; a stage itself among them."""
        found = {start}
        for each in self._in_order:
            if not found.isdisjoint(each.before):
                found.add(each)
        return tuple(stage for stage in self.order if stage in found)

    @property
    def pretrained(self) -> dict[str, PretrainedModel]:
        """The pretrained models that stages start from or learn from, or that make rows, by name."""
        stages = self.starts_of(self.stages)
        wanted = {start.name for stage in stages for start in stage.before}
        wanted |= {maker for blend in self.blends.values() for maker in blend.makers}
        return {name: self.models[name] for name in sorted(wanted & self.models.keys())}

    @property
    def has_tasks(self) -> bool:
        """Whether exports are scored on tasks."""
        return self.evaluation is not None and bool(self.evaluation.tasks)

    @property
    def published(self) -> tuple[RowsNode, ...]:
        """The rows that are published or synthesized; models make the others."""
        return self.rows_of(*(name for name, blend in self.blends.items() if not blend.makers))

    @property
    def published_prompts(self) -> list[str]:
        """The names of the published or synthesized blends that models respond to."""
        return [rows.name for rows in self.published if rows.blend.row_kind.is_answered]

    @cached_property
    def scored_rows(self) -> tuple[RowsNode, ...]:
        """The rows whose held-out prompts all scored stages answer."""
        if self.evaluation is None or self.evaluation.max_new_tokens is None:
            return ()
        return self.rows_of(*(self.evaluation.blends or self.published_prompts))

    @cached_property
    def tested_rows(self) -> tuple[RowsNode, ...]:
        """The rows whose test prompts the ends answer."""
        is_tested = self.evaluation is not None and self.evaluation.test
        return tuple(rows for rows in self.scored_rows if is_tested and rows.has(TEST_SPLIT))

    @cached_property
    def ends(self) -> tuple[Trained, ...]:
        """The ends of the chain that are scored on test rows: stages and choices that nothing starts from."""
        if self.evaluation is None or not self.evaluation.test:
            return ()
        inner = {start.stage for stage in self.starts_of(self.stages) for start in stage.starts}
        inner |= {name for choice in self.choices.values() for name in choice.among}
        inner |= {name for sweep in self.sweeps.values() for name in sweep}
        ends = self.starts_of(name for name in (*self.stages, *self.choices) if name not in inner)
        return tuple(end for end in ends if end.is_scored)
