"""Choose among variants or checkpoints of a stage by a score, and publish the best in a folder as a stage does.

The score is held_out_mean, the mean of eval.json; worst_environment_change, the lowest of the bounds by which gates
judge (joint_low); or a task of benchmarks.json. Differences from the best are taken on the same resampled rows
(scripts.stage.bootstrap), or by standard errors where a task's documents are not kept, and so widely that all
comparisons with any one candidate hold at once with 95 % (Bonferroni). Who is not clearly below the best is tied with
it, so that the truly best is chosen or tied in at least 95 of 100 choices (Hsu, Constrained simultaneous confidence
intervals for multiple comparisons with the best, Annals of Statistics 12, 1984).
"""

import argparse
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from scripts.errors import UserError, run_program
from scripts.evaluate.benchmarks import document_scores, interval_of, path_in, read_kept, unpaired_change
from scripts.files import filled_by_program, replace_directory, write_json
from scripts.recipe.sweep import HELD_OUT_MEAN, WORST_CHANGE
from scripts.records import Benchmarks, Candidate, Change, Choice, Evaluation, ExportRecord, Gate, read_record
from scripts.stage.bootstrap import CONFIDENCE, LEAST_ROWS, interval, resample
from scripts.stage.paths import StagePaths
from scripts.stage.tables import ROLLOUTS, read_table

HELD_OUT = (HELD_OUT_MEAN, WORST_CHANGE)
ROW = ["environment", "split", "line", "prompt"]
FOLDERS, LINKS, HIDDEN = ("ckpt", "hf"), ("exports", "run"), shutil.ignore_patterns(".*")
FILES = ("config.yaml", "metrics.parquet", "eval.json", "rollouts.parquet", "benchmarks.json", "gate.json")
FILES += ("criteria.json",)


class LeftOut(Exception):
    """Why a candidate cannot be chosen."""


class Scored(NamedTuple):
    """A score with its interval; `means` of resampled rows, (2000,), pair with those of one that was asked alike."""

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
    differences = {name: _difference(scored[name], scored[order[0]], len(order) - 1) for name in order[1:]}
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


def _difference(scored: Scored, best: Scored, compared: int) -> Change | None:
    """A score less the best; None where too few rows bear an interval."""
    if scored.means is None or best.means is None:
        spread = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / compared)
        return unpaired_change(*({"score": each.score, "stderr": each.stderr} for each in (best, scored)), spread)
    low, high = interval(scored.means - best.means, compared)
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
        bounds = interval(mean) if is_enough else (None, None)
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

    choice.json goes first and comes last, so that it is never beside what another choice left.
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
    for name in LINKS:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path("..", chosen.name, name))
    write_json(StagePaths(folder).choice, choice)


def words_of(choice: Choice) -> str:
    """Describe a choice in a line: candidates, score, ties, candidates left out."""
    candidates, best = choice["candidates"], choice["candidates"][0]
    bounds = "" if best["low"] is None else f", 95 % interval {best['low']:.3f} to {best['high']:.3f}"
    says = f"{choice['stage']}: {', '.join(choice['chosen'])} chosen among {len(candidates)} by {choice['by']}"
    says += f" (highest {best['score']:.3f}{bounds})"
    if tied := ", ".join(each["name"] for each in candidates if each["tied"]):
        says += f"; tied with {best['name']}: {tied}"
    left_out = ", ".join(f"{each['name']} ({each['left_out']})" for each in candidates if each["left_out"])
    return f"{says}; left out: {left_out}" if left_out else says


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
