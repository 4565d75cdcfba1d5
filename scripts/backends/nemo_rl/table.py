"""docs/recipes.md: the production recipes, their stages side by side and beside the published figures.

The recipes say what is trained, docs/recipes.yaml what is said of them and what published documents say.
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter

from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.errors import run_program
from scripts.files import write_text
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.strict import Strict
from scripts.recipe.yaml_file import repository_root

GPUS_PER_NODE = 8
DOCUMENT = repository_root() / "docs/recipes.md"
INTRODUCTION = """\
# Recipes for NeMo-RL

Written by `python -m scripts.backends.nemo_rl.table` from the recipes in `config/recipes/` and from `recipes.yaml`; a
test keeps it equal. `tiny` trains on one machine without NeMo-RL and is not among them.

## Which one

{summary}

Choose by where the reward comes from, not by the model:

{choice}

What does not fit is refused before anything runs: pairs with GRPO, a check or a judge with DPO or MPO, and a blend of
another kind than the algorithm's (`preferences` for DPO and MPO, `prompts` for GRPO). Before you scale a reward up, try
it on a few answers whose reward you know, and watch KL, the reward's spread, length and held-out scores besides its
mean.

## How to read the tables

Published figures stand in brackets, and ✓ beside a name that is the published one; ≠ marks what differs, and a note
says why. Where a document and the config of the release differ, the release wins, because it is what runs. All recipes
keep the newest checkpoints only (`keep_last_k`), where NeMo-RL's configs of these models keep nearly all; and stages
whose reward model compares a whole group never validate (`val_period: -1`; the configs say 10000). Which of a recipe's
keys a checkout lacks, or else which values it has otherwise, says

```
python -m scripts.backends.nemo_rl.upstream config/recipes/super3.yaml /path/to/nemo-rl
```
"""
CHOICE = (
    ("you have", "`reward`", "algorithm", "start from"),
    (
        "pairs of a better and a worse answer, and nothing that scores a new one",
        "`pairs`",
        "DPO; MPO with images",
        "`steps-dpo`; `dpo` of `nano3`, `mpo` of `omni3`",
    ),
    (
        "a check that a program does: tests, a reference answer, a schema, a tool call",
        "`verifier`",
        "GRPO",
        "`steps-rlvr`; the stages of RLVR, SWE, text and vision",
    ),
    ("a model that scores or compares answers", "`judge`", "GRPO", "`steps-rlhf`; the stages of RLHF"),
)


class Published(Strict):
    """Figures that a published document gives for some stages, by row."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    source: str
    stages: list[str]
    figures: dict[str, str]
    why: dict[str, str] = Field({}, description="By row, why the recipe has another figure.")


class About(Strict):
    """What is said of a recipe; `nodes` are figures like `published`, apart because recipes share the latter."""

    about: list[str]
    published: list[Published]
    nodes: list[Published] = Field([])


def load_about(root: Path | None = None) -> dict[str, About]:
    """What docs/recipes.yaml says, by recipe."""
    text = ((root or repository_root()) / "docs/recipes.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, About]).validate_python(yaml.safe_load(text))


def _at(settings: dict[str, Any], *keys: str) -> Any:
    node: Any = settings
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if not 0 < value < 1e-3:
        return f"{value:g}"
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def _nodes(stage: NemoRlSettings, _: Release) -> str:
    judges = stage.cluster.judge_nodes
    return f"{stage.resources.nodes}{f', {judges} of them judge' if judges else ''}"


def _learning_rate(stage: NemoRlSettings, _: Release) -> str:
    megatron = _at(stage.policy, "megatron_cfg", "optimizer", "lr")
    return _number(_at(stage.policy, "optimizer", "kwargs", "lr") if megatron is None else megatron)


def _kl_weight(stage: NemoRlSettings, _: Release) -> str:
    settings = stage.loss_fn if stage.algorithm == "grpo" else getattr(stage, stage.algorithm)
    return _number(settings.get("reference_policy_kl_penalty"))


def _overlong_filtering(stage: NemoRlSettings, _: Release) -> str:
    return str(stage.grpo["overlong_filtering"]).lower() if stage.algorithm == "grpo" else "–"


def _parallelism(stage: NemoRlSettings, _: Release) -> str:
    megatron, dtensor = stage.policy.get("megatron_cfg"), stage.policy.get("dtensor_cfg", {})
    if megatron is None:
        sizes = [dtensor.get(f"{way}_parallel_size", 1) for way in ("tensor", "pipeline", "context", "expert")]
    else:
        ways = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = [megatron.get(f"{way}_parallel_size", 1) for way in ways]
    return " / ".join(str(size) for size in sizes)


def _generator(stage: NemoRlSettings, _: Release) -> str:
    return str(_at(stage.policy, "generation", "vllm_cfg", "tensor_parallel_size") or "–")


ROWS: dict[str, Callable[[NemoRlSettings, Release], str]] = {
    "algorithm": lambda stage, _: stage.algorithm.upper(),
    "reward from": lambda stage, _: stage.reward,
    "nodes": _nodes,
    "GPUs": lambda stage, _: str(stage.resources.nodes * GPUS_PER_NODE),
    "prompts a step": lambda stage, _: str(stage.grpo.get("num_prompts_per_step", "–")),
    "generations a prompt": lambda stage, _: str(stage.grpo.get("num_generations_per_prompt", "–")),
    "batch": lambda stage, _: str(stage.policy["train_global_batch_size"]),
    "sequence length": lambda stage, _: str(stage.policy["max_total_sequence_length"]),
    "learning rate": _learning_rate,
    "KL weight": _kl_weight,
    "overlong filtering": _overlong_filtering,
    "steps": lambda stage, _: str(stage.max_num_steps or "one pass"),
    "trains by": lambda stage, _: "Megatron" if "megatron_cfg" in stage.policy else "DTensor",
    "TP / PP / CP / EP": _parallelism,
    "vLLM TP": _generator,
    "save period": lambda stage, _: str(stage.checkpointing.save_period),
    "config": lambda stage, _: Path(stage.config).name,
    "image": lambda stage, release: release.images.get(stage.image, stage.image),
}
LITERAL = {"config", "image"}


def _table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _summary(recipes: dict[str, Recipe]) -> str:
    rows = [["recipe", "release", "stages", "most nodes", "`reward`"]]
    for name, recipe in recipes.items():
        most = max(stage.resources.nodes for stage in recipe.stages.values())
        rewards = dict.fromkeys(stage.reward for stage in recipe.stages.values())
        rows.append([f"[{name}](#{name})", recipe.release, ", ".join(recipe.stages), str(most), ", ".join(rewards)])
    return _table(rows)


def side_by_side(cells: dict[str, list[str]]) -> list[list[str]]:
    """The stages' cells (one for each of ROWS) as rows with a head; stages that are alike share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for stage, its in cells.items():
        columns.setdefault(tuple(its), []).append(stage)
    head = ["", *(", ".join(stages) for stages in columns.values())]
    return [head, *([label, *(column[place] for column in columns)] for place, label in enumerate(ROWS))]


def section(name: str, recipe: Recipe, about: About) -> str:
    """A recipe's paragraphs, its table (stages that are alike share a column) and the notes on what differs."""
    release, notes = release_of(recipe.release), {}
    cells = {}
    for stage_name, stage in recipe.stages.items():
        figures = [it for it in [*about.published, *about.nodes] if stage_name in it.stages]
        cells[stage_name] = [_cell(label, row(stage, release), figures, notes, name) for label, row in ROWS.items()]
    sources = dict.fromkeys(it.source for it in [*about.published, *about.nodes])
    folders = dict.fromkeys(f"`{Path(stage.config).parent}`" for stage in recipe.stages.values())
    below = f"In brackets: {'; '.join(sources)}. The configs lie in {', '.join(folders)}."
    parts = [f"## {name}", *map(_wrapped, about.about), _table(side_by_side(cells)), _wrapped(below)]
    parts += [_wrapped(f"[^{name}-{number}]: {why}") for why, number in notes.items()]
    return "\n\n".join(parts)


def _cell(label: str, ours: str, published: list[Published], notes: dict[str, int], recipe: str) -> str:
    """Our figure and the published one; where they differ, the mark of the note that says why."""
    shown = f"`{ours}`" if label in LITERAL else ours
    found = [it for it in published if label in it.figures]
    if not found:
        return shown
    (it,) = found
    theirs = it.figures[label]
    plain = ours.partition(", ")[0]
    if theirs in (plain, f"{int(plain) // 1000}K" if plain.isdigit() else None):
        return f"{shown} ✓" if label in LITERAL else f"{shown} ({theirs})"
    number = notes.setdefault(it.why[label], len(notes) + 1)
    return f"{shown} (≠ {f'`{theirs}`' if label in LITERAL else theirs})[^{recipe}-{number}]"


def document() -> str:
    """The whole document."""
    root, about = repository_root(), load_about()
    recipes = {name: load_recipe(root / f"config/recipes/{name}.yaml") for name in about}
    introduction = INTRODUCTION.format(summary=_summary(recipes), choice=_table([list(row) for row in CHOICE]))
    return "\n\n".join([introduction.rstrip(), *(section(name, recipes[name], about[name]) for name in about)]) + "\n"


def main() -> None:
    """Write the document."""
    write_text(DOCUMENT, document())


if __name__ == "__main__":
    run_program(main)
