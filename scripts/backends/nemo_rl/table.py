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
from scripts.backends.nemo_rl.runtime import stages_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.nemo_rl.upstream import ABSENT, value_of
from scripts.errors import run_program
from scripts.files import write_text
from scripts.recipe.load import load_recipe, load_whole_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site, Slurm
from scripts.recipe.strict import Strict
from scripts.recipe.yaml_file import installation
from scripts.stage.ladder import GPUS_PER_NODE, HEAD, RECIPES, ladder_of, row_of

DOCUMENT = installation() / "docs/recipes.md"


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


def load_texts(root: Path | None = None) -> tuple[str, dict[str, About]]:
    """What docs/recipes.yaml says: the introduction, and of each recipe."""
    texts = yaml.safe_load(((root or installation()) / "docs/recipes.yaml").read_text(encoding="utf-8"))
    return texts.pop("introduction"), TypeAdapter(dict[str, About]).validate_python(texts)


def _policy(stage: NemoRlSettings, key: str) -> Any:
    value = value_of(stage.policy, key)
    return None if value == ABSENT else value


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if not 0 < value < 1e-3:
        return f"{value:g}"
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def _passes(epochs: int) -> str:
    return "one pass" if epochs == 1 else f"{epochs} passes"


def _nodes(stage: NemoRlSettings, _: Release) -> str:
    judges = stage.cluster.judge_nodes
    return f"{stage.resources.nodes}{f', {judges} of them judge' if judges else ''}"


def _learning_rate(stage: NemoRlSettings, _: Release) -> str:
    megatron = _policy(stage, "megatron_cfg.optimizer.lr")
    return _number(_policy(stage, "optimizer.kwargs.lr") if megatron is None else megatron)


def _kl_weight(stage: NemoRlSettings, _: Release) -> str:
    settings = stage.loss_fn if stage.algorithm == "grpo" else getattr(stage, stage.algorithm)
    return _number(settings.get("reference_policy_kl_penalty"))


def _parallelism(stage: NemoRlSettings, _: Release) -> str:
    by_megatron = "megatron_cfg" in stage.policy
    section, suffix = ("megatron_cfg", "_model") if by_megatron else ("dtensor_cfg", "")
    groups = (f"tensor{suffix}", f"pipeline{suffix}", "context", f"expert{suffix}")
    return " / ".join(str(_policy(stage, f"{section}.{group}_parallel_size") or 1) for group in groups)


ROWS: dict[str, Callable[[NemoRlSettings, Release], str]] = {
    "algorithm": lambda stage, _: stage.algorithm.upper(),
    "reward from": lambda stage, _: stage.reward or "–",
    "nodes": _nodes,
    "GPUs": lambda stage, _: str(stage.resources.nodes * GPUS_PER_NODE),
    "prompts a step": lambda stage, _: str(stage.grpo.get("num_prompts_per_step", "–")),
    "generations a prompt": lambda stage, _: str(stage.grpo.get("num_generations_per_prompt", "–")),
    "batch": lambda stage, _: str(stage.policy["train_global_batch_size"]),
    "sequence length": lambda stage, _: str(stage.policy["max_total_sequence_length"]),
    "learning rate": _learning_rate,
    "KL weight": _kl_weight,
    "overlong filtering": lambda stage, _: str(stage.grpo.get("overlong_filtering", "–")).lower(),
    "steps": lambda stage, _: str(stage.max_num_steps or _passes(stage.section.get("max_num_epochs", 1))),
    "trains by": lambda stage, _: "Megatron" if "megatron_cfg" in stage.policy else "DTensor",
    "TP / PP / CP / EP": _parallelism,
    "vLLM TP": lambda stage, _: str(_policy(stage, "generation.vllm_cfg.tensor_parallel_size") or "–"),
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


def _ladders(tops: list[Recipe]) -> str:
    """The rungs of all ladders, one after the other, without what any results have measured."""
    site, rows = Site(name="any", threads=1, slurm=Slurm()), [[*HEAD, "next rung"]]
    for rungs in filter(lambda rungs: len(rungs) > 1, map(ladder_of, tops)):
        for rung in rungs:
            name, *row = row_of(rung, site, Path("/nowhere"))
            rows.append([f"[{name}](../config/recipes/{name}.yaml)", *row, rung.next_rung or ""])
    return _table(rows)


def _summary(recipes: dict[str, Recipe]) -> str:
    rows = [["recipe", "release", "stages", "most nodes", "`reward`"]]
    for name, recipe in recipes.items():
        most = max(stage.resources.nodes for stage in recipe.stages.values())
        rewards = dict.fromkeys(stage.reward for stage in stages_of(recipe).values() if stage.reward)
        rows.append(
            [
                f"[{name}](#{name.replace('.', '')})",
                recipe.release,
                ", ".join(recipe.stages),
                str(most),
                ", ".join(rewards),
            ]
        )
    return _table(rows)


def side_by_side(cells: dict[str, list[str]]) -> list[list[str]]:
    """The stages' cells (one for each of ROWS) as rows with a head; stages that are alike share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for stage, column in cells.items():
        columns.setdefault(tuple(column), []).append(stage)
    head = ["", *(", ".join(stages) for stages in columns.values())]
    return [head, *([label, *row] for label, *row in zip(ROWS, *columns, strict=True))]


def section(name: str, recipe: Recipe, about: About) -> str:
    """A recipe's paragraphs, its table (stages that are alike share a column) and the notes on what differs."""
    release, notes, published = release_of(recipe.release), {}, [*about.published, *about.nodes]
    cells = {}
    for stage_name, stage in stages_of(recipe).items():
        figures = [document for document in published if stage_name in document.stages]
        cells[stage_name] = [_cell(label, row(stage, release), figures, notes, name) for label, row in ROWS.items()]
    sources = dict.fromkeys(document.source for document in published)
    folders = dict.fromkeys(f"`{Path(stage.config).parent}`" for stage in stages_of(recipe).values())
    below = f"In brackets: {'; '.join(sources)}. The configs lie in {', '.join(folders)}."
    parts = [f"## {name}", *map(_wrapped, about.about), _table(side_by_side(cells)), _wrapped(below)]
    parts += [_wrapped(f"[^{name}-{number}]: {why}") for why, number in notes.items()]
    return "\n\n".join(parts)


def _cell(label: str, ours: str, published: list[Published], notes: dict[str, int], recipe: str) -> str:
    """Our figure and the published one; where they differ, the mark of the note that says why."""
    shown = f"`{ours}`" if label in LITERAL else ours
    documents = [document for document in published if label in document.figures]
    if not documents:
        return shown
    (document,) = documents
    theirs = document.figures[label]
    plain = ours.partition(", ")[0]
    if theirs in (plain, f"{int(plain) // 1000}K" if plain.isdigit() else None):
        return f"{shown} ✓" if label in LITERAL else f"{shown} ({theirs})"
    number = notes.setdefault(document.why[label], len(notes) + 1)
    return f"{shown} (≠ {f'`{theirs}`' if label in LITERAL else theirs})[^{recipe}-{number}]"


def document() -> str:
    """The whole document."""
    introduction, about = load_texts()
    recipes = {name: load_whole_recipe(RECIPES / f"{name}.yaml") for name in about}
    tops = [load_recipe(RECIPES / f"{name}.yaml") for name, recipe in recipes.items() if recipe.next_rung is None]
    summary, ladders = _summary(recipes), _ladders(tops)
    sections = (section(name, recipes[name], about[name]) for name in about)
    return "\n\n".join([introduction.rstrip().format(summary=summary, ladders=ladders), *sections]) + "\n"


def main() -> None:
    """Write the document."""
    write_text(DOCUMENT, document())


if __name__ == "__main__":
    run_program(main)
