"""The recipe's tasks of lm-evaluation-harness: loaded, their data sets fetched, and named by a key of all they ask.

The key is a hash of the harness's version, the task's config with its functions, the documents, the examples and how
they are put to the model. tasks.json holds the keys; a score is kept by the export's content and the key.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from scripts.errors import UserError, run_program
from scripts.files import sha256_file, sha256_text, write_json
from scripts.recipe.evaluation import EvaluationBase, Task
from scripts.recipe.load import load_recipe
from scripts.recipe.strict import nearest

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
KEY = 16
UNFIT = {
    "UNSAFE_CODE": "runs code that the model writes, which lm-eval does not confine; leave it out",
    "MULTIMODAL": "shows pictures or sounds, which are not evaluated here; leave it out",
}


class Asked(NamedTuple):
    """A task of the recipe as lm-eval's manager has loaded it, its leaf tasks by name, and its key."""

    task: Task
    manager: Any
    parts: list[Any]
    leaves: dict[str, Any]
    key: str


def import_harness(packages: Path) -> str:
    """Make lm-eval importable, from a folder of packages where this Python has none; its version."""
    try:
        return version("lm_eval")
    except PackageNotFoundError:
        sys.path.append(str(packages))  # last: of what both have, this Python's own counts
    try:
        import_module("lm_eval.tasks")
        return version("lm_eval")
    except (ImportError, PackageNotFoundError) as error:
        raise UserError(
            f"{sys.executable} cannot use lm-eval from {packages}: {error}; delete that folder, and Snakemake makes it "
            "again for this Python; or install envs/lm-eval.txt into its environment"
        ) from None


def engine() -> str:
    """The model class of lm-eval that this Python has: vllm, else hf."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "hf"
    return "vllm"


def load_tasks(evaluation: EvaluationBase, harness: str) -> dict[str, Asked]:
    """The tasks of an evaluation by name; UserError for one that is not known or asks what lm-eval would not do."""
    return {task.task: _load(task, evaluation, harness) for task in evaluation.task_list}


@cache
def _manager(folder: Path | None, with_defaults: bool = True) -> Any:
    return import_module("lm_eval.tasks").TaskManager(include_path=folder, include_defaults=with_defaults)


def _load(task: Task, evaluation: EvaluationBase, harness: str) -> Asked:
    folder = Path(task.include_path).absolute() if task.include_path else None
    own = folder and _manager(folder, with_defaults=False)
    manager = own if own and task.task in own.all_subtasks else _manager(folder)
    if task.task not in manager.all_tasks:
        where = f" of lm-eval {harness}{f' or {folder}' if folder else ''}"
        raise UserError(f"evaluation.tasks: no task{where} is named {task.task}{_hint(task.task, manager.all_tasks)}")
    try:
        loaded = manager.load([task.task])
    except Exception as error:  # whatever a task's own file, or the fetching of its data set, raises
        raise UserError(f"evaluation.tasks: {task.task}: {type(error).__name__}: {error}") from error
    leaves = loaded["tasks"]
    parts = [loaded["groups"][task.task]] if task.task in loaded["groups"] else [*leaves.values()]
    for name, leaf in leaves.items():
        for flag, why in UNFIT.items():
            if getattr(leaf, flag, False):
                raise UserError(f"evaluation.tasks: {task.task}: {name} {why}")
        if task.num_fewshot and leaf.get_config("num_fewshot") == 0:
            raise UserError(
                f"evaluation.tasks: {task.task}: the file of {name} says num_fewshot: 0, which lm-eval keeps to; leave "
                "num_fewshot out, or write a task of your own"
            )
        metrics = {
            *leaf.aggregation(),
            *(f"{metric},{each.name}" for metric in leaf.aggregation() for each in leaf._filters),
        }
        if task.metric not in (None, *metrics):
            raise UserError(
                f"evaluation.tasks: {task.task}: no metric of {name} is {task.metric}{_hint(task.metric, metrics)}"
            )
    return Asked(task, manager, parts, leaves, _key(task, evaluation, harness, leaves, folder))


def _hint(name: str, known: Iterable[str]) -> str:
    """The nearest of names; all of them only where they are few."""
    hint = nearest(name, known)
    return hint if len(hint) < 300 else "; lm-eval ls tasks lists them"


def _key(task: Task, evaluation: EvaluationBase, harness: str, leaves: dict[str, Any], folder: Path | None) -> str:
    settings = ("apply_chat_template", "fewshot_as_multiturn", "max_length", "chat_template_kwargs")
    code = sorted(folder.rglob("*.py")) if folder else []
    whole = {
        "harness": harness,
        "engine": engine(),
        "task": task.model_dump(mode="json", exclude={"include_path"}),
        "settings": evaluation.model_dump(mode="json", include={*settings}),
        "configs": {name: dict(leaf.dump_config()) for name, leaf in sorted(leaves.items())},
        "documents": {name: _hash(leaf.eval_docs) for name, leaf in sorted(leaves.items())},
        "examples": {name: _hash(_examples(leaf, task)) for name, leaf in sorted(leaves.items())},
        "code": [sha256_file(path) for path in code],
    }
    return sha256_text(ADDRESS.sub("", _text(whole)))[:KEY]


def _examples(leaf: Any, task: Task) -> Iterable[Any]:
    shots = task.num_fewshot if task.num_fewshot is not None else leaf.get_config("num_fewshot")
    return (leaf.fewshot_docs() or ()) if shots else ()


def _hash(documents: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(_text(document).encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _described(asked: dict[str, Asked]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in asked.items():
        documents = sum(len(leaf.eval_docs) for leaf in each.leaves.values())
        yield name, {"key": each.key, "tasks": len(each.leaves), "documents": documents}


def main() -> None:
    """Command line: tasks.json."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate.tasks", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True, help="the folder of envs/lm-eval.txt's packages")
    parser.add_argument("--output", type=Path, required=True, help="tasks.json")
    arguments = parser.parse_args()
    harness = import_harness(arguments.packages)
    asked = load_tasks(load_recipe(arguments.recipe).evaluation, harness)
    write_json(arguments.output, {"harness": harness, "engine": engine(), "tasks": dict(_described(asked))})


if __name__ == "__main__":
    run_program(main)
