"""Settings of held-out scores and of scores on tasks."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.contents import Contents
from scripts.data.own_rows import DIGITS
from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file, sha256_text
from scripts.recipe.evaluation import OF_TASKS, Task
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments, read_values
from scripts.recipe.task_files import data_of_task, files_of_task
from scripts.rewards.judging_code import hash_of_environment
from scripts.stage.paths import StagePaths
from scripts.stage.settings_file import RuleSettings, Settings

# Keys of `evaluation` that change no held-out score, or change the inputs of the rule.
ASKING = OF_TASKS - {"chat_template_kwargs"} | {"stages", "blends", "test", "gym_servers"}


def settings_of_scores(recipe: Recipe, results: Path, contents: Contents) -> RuleSettings:
    """Settings of held-out scores, with the contents of the user's environments that judge the responses."""
    values = recipe.evaluation.model_dump(mode="json", exclude=ASKING, exclude_defaults=True)
    values |= recipe.model.reading
    files = ("eval.json", "rollouts.parquet", "test.json", "test_rollouts.parquet")
    trained = (*recipe.stages, *recipe.checkpoints)
    scored = [results / name / file for name in trained for file in files]
    scored += [results / name / "quantized" / file for name in trained for file in files[:2]]
    judging = {name for rows in recipe.graph.scored_rows for name in rows.blend.environments}
    own = {name: path for name, path in own_environments(recipe).items() if name in judging}
    if own:
        values["environments"] = {name: hash_of_environment(path, contents.of) for name, path in own.items()}

    def is_contradicted() -> bool:
        """Whether an environment is newer than the scores, of earlier versions, and no stage was trained with it."""
        return any(_is_newer(path, scored) and not _was_trained_with(name, path) for name, path in own.items())

    def _was_trained_with(name: str, path: Path) -> bool:
        configs = [_written_config(StagePaths(results / stage).run / "config.yaml") for stage in recipe.stages]
        return sha256_file(path) in [config.get("environments", {}).get(name) for config in configs]

    return RuleSettings(values, scored, is_contradicted, added=frozenset({"environments"}))


def settings_of_tasks(recipe: Recipe, results: Path, contents: Contents) -> RuleSettings:
    """Settings of lm-eval's tasks, with the contents of the user's own definitions and data."""
    values, outputs = recipe.evaluation.asked, [results / "tasks.json"]
    files = [file for task in recipe.evaluation.task_list for file in _files_read(task).values()]
    if files:
        values = values | {"files": _of_task_folders(recipe, contents)}
    is_contradicted = partial(_any_is_newer, files, outputs)
    return RuleSettings(values, outputs, is_contradicted, added=frozenset({"files"}))


def _of_task_folders(recipe: Recipe, contents: Contents) -> dict[str, str]:
    """Return a hash of the files of each task of the user's own, by the task's name."""
    found = {}
    for task in recipe.evaluation.task_list:
        files = _files_read(task)
        if files:
            hashes = contents.of_all(map(str, files.values()))
            named = {name: hashes[str(file)] for name, file in files.items()}
            found[task.task] = sha256_text(canonical_json(named))[:DIGITS]
    return found


def _files_read(task: Task) -> dict[str, Path]:
    """Return the files that a task of the user's own reads, by names that stay if all is moved; none of lm-eval's."""
    folder = Path(task.include_path or "").absolute()
    inside = {str(Path(file).relative_to(folder)): Path(file) for file in files_of_task(task)}
    elsewhere = {f"{place}: {Path(file).name}": Path(file) for place, file in enumerate(data_of_task(task))}
    return inside | elsewhere


def _any_is_newer(files: list[Path], outputs: list[Path]) -> bool:
    return any(_is_newer(file, outputs) for file in files)


def _is_newer(file: Path, outputs: list[Path]) -> bool:
    """Whether a file was written after the oldest output that is there."""
    times = [output.stat().st_mtime_ns for output in outputs if output.exists()]
    return bool(times) and file.stat().st_mtime_ns > min(times)


def _written_config(path: Path) -> Settings:
    """Return the values of a training's config; none where it is missing or damaged."""
    with suppress(UserError):
        return read_values(path) if path.exists() else {}
    return {}
