"""Choose among variants or checkpoints of a stage by a score, and publish the best in a folder as a stage does.

The score is held_out_mean, the mean of eval.json; worst_environment_change, the lowest of the bounds by which gates
judge (joint_low): the worst environment's change that chance does not explain; or a task of benchmarks.json. The
highest is chosen, of equal ones the candidate named first. One whose gate says stop, or that has no score on the rows
of the others, is left out.

Differences from the best are taken on the same resampled rows (scripts.stage.bootstrap), or by standard errors where a
task's documents are not kept. Their intervals are so wide that all comparisons with any one candidate hold at once with
95 % (Bonferroni); who is not clearly below the best is tied with it. So the candidate that is truly best is chosen or
tied in at least 95 of 100 choices (Hsu, Constrained simultaneous confidence intervals for multiple comparisons with
the best, Annals of Statistics 12, 1984). For worst_environment_change the distance of a bound from its mean is taken as
given.
"""

import argparse
import os
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from scripts.errors import UserError, run_program
from scripts.evaluate.benchmarks import document_scores, interval_of, path_in, read_kept, unpaired_change
from scripts.files import explain_write_errors, fsync_directory, sync_tree, temporary_directory, write_json
from scripts.recipe.sweep import HELD_OUT_MEAN, WORST_CHANGE
from scripts.records import (
    Benchmarks,
    Candidate,
    Change,
    Choice,
    Evaluation,
    ExportRecord,
    Gate,
    read_if_there,
    read_record,
)
from scripts.stage.bootstrap import CONFIDENCE, LEAST_ROWS, interval, joint_confidence, resample
from scripts.stage.paths import StagePaths
from scripts.stage.selection import words_of
from scripts.stage.tables import ROLLOUTS, read_table

HELD_OUT = (HELD_OUT_MEAN, WORST_CHANGE)
ROW = ["environment", "split", "line", "prompt"]
FOLDERS, LINKS = ("ckpt", "hf"), ("exports", "run")
FILES = ("config.yaml", "metrics.parquet", "eval.json", "rollouts.parquet", "benchmarks.json", "gate.json")
FILES += ("criteria.json",)


class LeftOut(Exception):
    """Why a candidate cannot be chosen."""


class Scored(NamedTuple):
    """A score with its interval; None: it has none.

    `means` are of resampled rows, (2000,), which pair with those of another where `asked` is equal. Without them
    `stderr` tells how sure the score is.
    """

    score: float
    low: float | None
    high: float | None
    asked: Any
    means: np.ndarray | None
    stderr: float | None = None


def rank(folders: list[StagePaths], by: str, store: Path | None = None) -> list[Candidate]:
    """The candidates by their scores, the highest first and those left out last. UserError where all are.

    `store` is the folder where the answers to tasks are kept (scripts.evaluate.benchmarks).
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
    best, confidence = scored[order[0]], joint_confidence(len(order) - 1)
    differences = {name: _difference(scored[name], best, confidence) for name in order[1:]}
    return [
        {
            "name": name,
            **{key: exports[name][key] for key in ("identity", "step", "content")},
            **{key: getattr(scored.get(name), key, None) for key in ("score", "low", "high")},
            "difference": differences.get(name),
            "tied": name in differences and (differences[name] is None or differences[name]["high"] >= 0),
            "left_out": left_out.get(name),
        }
        for name in (*order, *left_out)
    ]


def _difference(scored: Scored, best: Scored, confidence: float) -> Change | None:
    """A score less the best; None where too few rows bear an interval."""
    if scored.means is None or best.means is None:
        spread = NormalDist().inv_cdf((1 + confidence) / 2)
        return unpaired_change(*({"score": each.score, "stderr": each.stderr} for each in (best, scored)), spread)
    low, high = interval(scored.means - best.means, confidence)
    return {"value": round(scored.score - best.score, 6), "low": low, "high": high}


def _score(paths: StagePaths, content: str, by: str, store: Path | None) -> Scored:
    """A candidate's score; LeftOut where it has none or may not be chosen. `content` is its export's."""
    if read_record(paths.gate, Gate)["verdict"] == "stop":
        raise LeftOut("its gate says stop")
    path, kind = (paths.evaluation, Evaluation) if by in HELD_OUT else (paths.benchmarks, Benchmarks)
    if not path.exists():
        raise LeftOut(f"it has no {path.name}")
    record = read_record(path, kind)
    if record.get("content", content) != content:
        raise LeftOut(f"its {path.name} is of another export; snakemake {path}")
    return _held_out(record, by, paths.rollouts) if by in HELD_OUT else _task(record, by, store)


def _held_out(evaluation: Evaluation, by: str, rollouts: Path) -> Scored:
    """A score that rests on held-out rows."""
    rows = read_table(rollouts, ROLLOUTS).to_pandas().sort_values(ROW[:3])
    asked, is_mean = rows[ROW].to_numpy().tolist(), by == HELD_OUT_MEAN
    values = rows["reward_after"] - (0 if is_mean else rows["reward_before"])
    means = resample({name: part.to_numpy() for name, part in values.groupby(rows["environment"])})
    entries = evaluation["environments"]
    if is_mean:
        is_enough = len(rows) >= LEAST_ROWS and len(means) == len(entries)
        mean = np.mean([*means.values()], axis=0) if is_enough else None
        bounds = interval(mean, CONFIDENCE) if is_enough else (None, None)
        return Scored(evaluation["mean"]["after"], *bounds, asked, mean)
    changes = {name: entry["change"] for name, entry in entries.items()}
    if unmeasured := [name for name, change in changes.items() if change is None]:
        raise LeftOut(f"no change of {unmeasured[0]} with an interval: too few rows, or not scored before the stage")
    worst = min(changes.values(), key=lambda change: change["joint_low"])
    lows = [means[name] - change["value"] + change["joint_low"] for name, change in changes.items()]
    return Scored(worst["joint_low"], worst["joint_low"], worst["joint_high"], asked, np.min(lows, axis=0))


def _task(record: Benchmarks, task: str, store: Path | None) -> Scored:
    """A score on a task, with its documents where they are kept and the score is their mean."""
    entry = record["benchmarks"].get(task)
    if entry is None:
        raise LeftOut(f"it has no score on {task}")
    key, bounds = entry.get("key"), interval_of(entry) or {"low": None, "high": None}
    path = path_in(store, record["content"], key) if store and key else None
    documents = document_scores(read_kept(path), task) if path and path.exists() else None
    means = resample({task: documents})[task] if documents is not None and len(documents) >= LEAST_ROWS else None
    return Scored(entry["score"], bounds["low"], bounds["high"], key, means, entry.get("stderr"))


def publish(chosen: StagePaths, folder: Path, choice: Choice) -> None:
    """Let a folder hold what a stage's holds for its children: the chosen one's records, links to its run and exports.

    What is equal already is left alone. choice.json is there only while all of the folder is of the one it names:
    whatever else changes, it goes first and comes last, so after a kill the choice is made again.
    """
    target = StagePaths(folder).choice
    with temporary_directory(folder / "published") as fresh, explain_write_errors(target):
        for name in FOLDERS:
            hidden = shutil.ignore_patterns(".*")
            shutil.copytree(chosen.directory / name, fresh / name, True, hidden, copy_function=shutil.copyfile)
        for name in FILES:
            if (chosen.directory / name).exists():
                shutil.copyfile(chosen.directory / name, fresh / name)
        for name in LINKS:
            (fresh / name).symlink_to(Path("..", chosen.name, name))
        sync_tree(fresh)
        names = (*FOLDERS, *FILES, *LINKS)
        if changed := [name for name in names if _content(fresh / name) != _content(folder / name)]:
            target.unlink(missing_ok=True)
        for name in changed:
            if os.path.lexists(folder / name):
                (folder / name).rename(fresh / f"{name}.old")
            if os.path.lexists(fresh / name):
                (fresh / name).rename(folder / name)
        fsync_directory(folder)
        if read_if_there(target, Choice) != choice:
            write_json(target, choice)


def _content(path: Path) -> Any:
    """What a file, link or folder of these holds; None where nothing is there."""
    if path.is_symlink():
        return path.readlink()
    if path.is_dir():
        return {each.name: _content(each) for each in path.iterdir() if not each.name.startswith(".")}
    return path.read_bytes() if path.exists() else None


def main() -> None:
    """Command line of the choice."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate.choose", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="the folder with the candidates' directories")
    parser.add_argument("--stage", required=True, help="whose variants or checkpoints they are")
    parser.add_argument("--by", required=True, help=f"{', '.join(HELD_OUT)} or a task of the evaluation")
    parser.add_argument("--candidates", nargs="+", required=True, help="their names; of equal scores the first counts")
    parser.add_argument("--keep", type=int, help="only name so many, the best, and publish none")
    parser.add_argument("--store", type=Path, help="results/benchmarks, by which a task's documents are paired")
    parser.add_argument("--folder", type=Path, required=True, help="the choice's")
    arguments = parser.parse_args()
    folders = [StagePaths(arguments.results / name) for name in arguments.candidates]
    candidates = rank(folders, arguments.by, arguments.store)
    names = [each["name"] for each in candidates if each["left_out"] is None][: arguments.keep or 1]
    choice = Choice(stage=arguments.stage, by=arguments.by, chosen=names, candidates=candidates)
    if arguments.keep:
        write_json(StagePaths(arguments.folder).choice, choice)
    else:
        publish(StagePaths(arguments.results / names[0]), arguments.folder, choice)
    print(words_of(choice), flush=True)


if __name__ == "__main__":
    run_program(main)
