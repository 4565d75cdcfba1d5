"""Choose the best of a stage's variants or checkpoints by a score, and publish it in a folder like a stage's.

The score is held_out_mean, the mean of eval.json, or a task's score in benchmarks.json. A candidate not clearly below
the best is tied: differences are taken on the same resampled rows (scripts.stage.bootstrap), and all comparisons with a
candidate hold at once with 95 % (Bonferroni). So the truly best is chosen or tied in at least 95 of 100 choices (Hsu,
Constrained simultaneous confidence intervals for multiple comparisons with the best, Annals of Statistics 12, 1984).
"""

import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from scripts.errors import UserError
from scripts.evaluate.benchmarks import interval_of, read_documents
from scripts.files import filled_by_program, link_to, replace_directory, write_json
from scripts.program import run_command_line
from scripts.recipe.expand import HELD_OUT_MEAN
from scripts.records import Benchmarks, Candidate, Choice, Evaluation, ExportRecord, Gate, read_record
from scripts.stage.bootstrap import LEAST_ROWS, interval, resample
from scripts.stage.paths import StagePaths
from scripts.stage.tables import ROLLOUTS, ROW, read_table

FOLDERS, LINKS, HIDDEN = ("ckpt", "hf"), ("run", "exports"), shutil.ignore_patterns(".*")
FILES = ("config.yaml", "metrics.parquet", "eval.json", "rollouts.parquet", "benchmarks.json", "gate.json")
FILES += ("criteria.json",)


class LeftOut(Exception):
    """Why a candidate cannot be chosen."""


class Scored(NamedTuple):
    """A score with its interval; `means` of resampled rows, (2000,), pair among candidates asked alike."""

    score: float
    low: float | None
    high: float | None
    asked: Any
    means: np.ndarray | None


def rank(folders: list[StagePaths], by: str, store: Path | None = None) -> list[Candidate]:
    """Rank candidates by score, highest first, those left out last; UserError where all are left out.

    `store` holds the answers to tasks (scripts.evaluate.benchmarks).
    """
    exports = {paths.name: read_record(paths.export_record, ExportRecord) for paths in folders}
    scored: dict[str, Scored] = {}
    left_out: dict[str, str] = {}
    for paths in folders:
        try:
            found = _score(paths, exports[paths.name]["content"], by, store)
            first = next(iter(scored), None)
            if first and found.asked != scored[first].asked:
                raise LeftOut(f"it was scored on other rows, or asked otherwise, than {first}")
            scored[paths.name] = found
        except LeftOut as error:
            left_out[paths.name] = str(error)
    if not scored:
        reasons = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
        raise UserError(f"none of {len(folders)} candidates can be chosen by {by}:{reasons}")
    order = sorted(scored, key=lambda name: -scored[name].score)
    best, candidates = scored[order[0]], []
    for name in (*order, *left_out):
        found, difference = scored.get(name), None
        if found and found is not best and found.means is not None and best.means is not None:
            low, high = interval(found.means - best.means, len(order) - 1)
            difference = {"value": round(found.score - best.score, 6), "low": low, "high": high}
        is_tied = bool(found) and found is not best and (difference is None or difference["high"] >= 0)
        candidates.append(
            {"name": name}
            | {key: exports[name][key] for key in ("identity", "step", "content")}
            | {key: getattr(found, key, None) for key in ("score", "low", "high")}
            | {"difference": difference, "tied": is_tied, "left_out": left_out.get(name)}
        )
    return candidates


def _score(paths: StagePaths, content: str, by: str, store: Path | None) -> Scored:
    """Return a candidate's score; LeftOut for a missing score or a gate's stop. `content` names its export."""
    if read_record(paths.gate, Gate)["verdict"] == "stop":
        raise LeftOut("its gate says stop")
    is_mean = by == HELD_OUT_MEAN
    path, kind = (paths.evaluation, Evaluation) if is_mean else (paths.benchmarks, Benchmarks)
    if not path.exists():
        raise LeftOut(f"it has no {path.name}")
    record = read_record(path, kind)
    if record.get("content", content) != content:
        raise LeftOut(f"its {path.name} is of another export; snakemake {path}")
    return _held_out(record, paths.rollouts) if is_mean else _task(record, by, store)


def _held_out(evaluation: Evaluation, rollouts: Path) -> Scored:
    rows = read_table(rollouts, ROLLOUTS).to_pandas().sort_values(["environment", "split", "line"])
    means = resample({name: part["reward_after"].to_numpy() for name, part in rows.groupby("environment")})
    is_enough = len(rows) >= LEAST_ROWS and len(means) == len(evaluation["environments"])
    mean = np.mean([*means.values()], axis=0) if is_enough else None
    bounds = interval(mean) if is_enough else (None, None)
    return Scored(evaluation["mean"]["after"], *bounds, rows[["environment", *ROW]].to_numpy().tolist(), mean)


def _task(record: Benchmarks, task: str, store: Path | None) -> Scored:
    """Return a task's score, with resampled documents where the score is their mean."""
    entry = record["benchmarks"].get(task)
    if entry is None:
        raise LeftOut(f"it has no score on {task}")
    key, bounds, documents = entry.get("key"), interval_of(entry) or {}, None
    if store and key:
        documents = read_documents(store / record["content"] / key, task, entry["metric"], entry["score"])
    is_enough = documents and len(documents) >= LEAST_ROWS
    means = resample({task: np.array([*documents.values()])})[task] if is_enough else None
    return Scored(entry["score"], bounds.get("low"), bounds.get("high"), key, means)


def publish(chosen: StagePaths, folder: Path, choice: Choice) -> None:
    """Fill a choice's folder with the chosen candidate's records and links to its run and exports.

    choice.json is removed first and written last, so it never stands beside files of another choice.
    """
    StagePaths(folder).choice.unlink(missing_ok=True)
    for name in FOLDERS:
        with replace_directory(folder / name) as fresh:
            shutil.copytree(chosen.directory / name, fresh, True, HIDDEN, shutil.copyfile, dirs_exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        if (chosen.directory / name).exists():
            with filled_by_program(folder / name) as fresh:
                shutil.copyfile(chosen.directory / name, fresh)
    for name in filter(lambda name: (chosen.directory / name).is_dir(), LINKS):
        link = chosen.directory / name
        link_to(folder / name, link.parent / link.readlink() if link.is_symlink() else link)
    write_json(StagePaths(folder).choice, choice)


def words_of(choice: Choice) -> str:
    """Describe a choice in a line: candidates, score, ties, candidates left out."""
    best, *others = choice["candidates"]
    bounds = "" if best["low"] is None else f", 95 % interval {best['low']:.3f} to {best['high']:.3f}"
    says = f"{choice['stage']}: {best['name']} chosen among {len(others) + 1} by {choice['by']}"
    same = [each["name"] for each in others if each["content"] == best["content"]]
    tied = [each["name"] for each in others if each["tied"] and each["name"] not in same]
    left_out = [f"{each['name']} ({each['left_out']})" for each in others if each["left_out"]]
    also = {"the same weights": same, "tied": tied, "left out": left_out}
    more = "".join(f"; {what}: {', '.join(names)}" for what, names in also.items() if names)
    return f"{says} (highest {best['score']:.3f}{bounds}){more}"


def main(
    results: Annotated[Path, "the folder with the candidates' directories"],
    stage: Annotated[str, "the stage of the variants or checkpoints"],
    by: Annotated[str, f"{HELD_OUT_MEAN} or a task of the evaluation"],
    candidates: Annotated[list[str], "their names; of equal scores the first counts"],
    folder: Annotated[Path, "the choice's folder, to be filled"],
    store: Annotated[Path | None, "results/benchmarks, by which a task's documents are paired"] = None,
) -> None:
    """Choose, and fill the folder of the choice."""
    ranked = rank([StagePaths(results / name) for name in candidates], by, store)
    chosen = ranked[0]["name"]
    choice = Choice(stage=stage, by=by, chosen=[chosen], candidates=ranked)
    publish(StagePaths(results / chosen), folder, choice)
    print(words_of(choice), flush=True)


if __name__ == "__main__":
    run_command_line(main)
