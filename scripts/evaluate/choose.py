"""Choose the best of a stage's variants or checkpoints by a score, and publish it in a folder like a stage's.

The score is held_out_mean, the mean of eval.json, a task's score in benchmarks.json, or a figure of held-out rows of
written answers (validation_loss, of which the lowest is best), which has no interval. A candidate not clearly below
the best is tied: differences are taken on the same resampled rows (scripts.stage.bootstrap), and all comparisons with a
candidate hold at once with 95 % (Bonferroni). So the truly best is chosen or tied in at least 95 of 100 choices (Hsu,
Constrained simultaneous confidence intervals for multiple comparisons with the best, Annals of Statistics 12, 1984).
"""

import math
import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from scripts.errors import UserError
from scripts.evaluate.benchmarks import interval_of, read_documents
from scripts.files import filled_by_program, link_to, replace_directory, write_json
from scripts.program import run_command_line
from scripts.recipe.expand import HELD_OUT_MEAN, VALIDATED
from scripts.recipe.resolve import read_values
from scripts.records import (
    Benchmarks,
    Candidate,
    Change,
    CheckpointRecord,
    Choice,
    Evaluation,
    ExportRecord,
    Gate,
    read_record,
)
from scripts.stage.bootstrap import LEAST_ROWS, interval, resample
from scripts.stage.measured import PREFIX, held_out_loss
from scripts.stage.paths import StagePaths
from scripts.stage.tables import METRICS, ROLLOUTS, ROW, read_table

FOLDERS, LINKS, HIDDEN = ("ckpt", "hf"), ("run", "exports"), shutil.ignore_patterns(".*")
FILES = ("config.yaml", "metrics.parquet", "eval.json", "rollouts.parquet", "benchmarks.json", "gate.json")
FILES += ("criteria.json",)
OF_STEPS = ("max_num_steps", "val_period", "val_batches")
"""Settings of an algorithm's section that make no other loss of a row."""


class LeftOut(Exception):
    """Why a candidate cannot be chosen."""


class Scored(NamedTuple):
    """A score with its interval; `means` of resampled rows, (2000,), pair among candidates asked alike.

    Without an interval only an equal score is tied where `is_exact`.
    """

    score: float
    low: float | None
    high: float | None
    asked: Any
    means: np.ndarray | None
    is_exact: bool = False


def rank(folders: list[StagePaths], by: str, store: Path | None = None) -> list[Candidate]:
    """Rank candidates by score, best first, those left out last; UserError where all are left out.

    `store` holds the answers to tasks (scripts.evaluate.benchmarks).
    """
    exports = {paths.name: read_record(paths.export_record, ExportRecord) for paths in folders}
    scored: dict[str, Scored] = {}
    left_out: dict[str, str] = {}
    for paths in folders:
        try:
            found = _score(paths, exports[paths.name]["content"], by, store)
            if not math.isfinite(found.score):
                raise LeftOut(f"its {by} is {found.score}, no finite number")
            first = next(iter(scored), None)
            if first and found.asked != scored[first].asked:
                raise LeftOut(f"it was scored on other rows, or asked otherwise, than {first}")
            scored[paths.name] = found
        except LeftOut as error:
            left_out[paths.name] = str(error)
    if not scored:
        reasons = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
        raise UserError(f"none of {len(folders)} candidates can be chosen by {by}:{reasons}")
    sign = -1 if VALIDATED.get(by, True) else 1
    order = sorted(scored, key=lambda name: sign * scored[name].score)
    best, candidates = scored[order[0]], []
    for name in (*order, *left_out):
        found, difference = scored.get(name), None
        if found and found is not best and found.means is not None and best.means is not None:
            low, high = interval(found.means - best.means, len(order) - 1)
            difference = {"value": round(found.score - best.score, 6), "low": low, "high": high}
        is_tied = bool(found) and found is not best and _is_tied(found, best, difference)
        candidates.append(
            {"name": name}
            | {key: exports[name][key] for key in ("identity", "step", "content")}
            | {key: getattr(found, key, None) for key in ("score", "low", "high")}
            | {"difference": difference, "tied": is_tied, "left_out": left_out.get(name)}
        )
    return candidates


def _is_tied(found: Scored, best: Scored, difference: Change | None) -> bool:
    """Whether chance explains a candidate's distance from the best."""
    if found.is_exact:
        return found.score == best.score
    return difference is None or difference["high"] >= 0


def _score(paths: StagePaths, content: str, by: str, store: Path | None) -> Scored:
    """Return a candidate's score; LeftOut for a missing score or a gate's stop. `content` names its export."""
    if read_record(paths.gate, Gate)["verdict"] == "stop":
        raise LeftOut("its gate says stop")
    if by in VALIDATED:
        return _validated(paths, by)
    is_mean = by == HELD_OUT_MEAN
    path, kind = (paths.evaluation, Evaluation) if is_mean else (paths.benchmarks, Benchmarks)
    if not path.exists():
        raise LeftOut(f"it has no {path.name}")
    record = read_record(path, kind)
    if record.get("content", content) != content:
        raise LeftOut(f"its {path.name} is of another export; snakemake {path}")
    return _held_out(record, paths.rollouts) if is_mean else _task(record, by, store)


def _validated(paths: StagePaths, by: str) -> Scored:
    """Return a figure of held-out rows at the checkpoint; candidates are asked alike by rows, tokens and loss."""
    checkpoint, config = read_record(paths.record, CheckpointRecord), read_values(paths.config)
    step, policy = checkpoint["step"], config["policy"]
    found = held_out_loss(read_table(paths.metrics, METRICS).to_pylist(), step)
    figure = (found or {}).get(by.removeprefix(PREFIX))
    if figure is None or figure["after"] is None or found["step"] != step:
        raise LeftOut(f"its held-out rows were not measured at step {step}")
    if not math.isfinite(figure["after"]):
        raise LeftOut(f"its {by} is not finite")
    loss = {key: value for key, value in config[config["algorithm"]].items() if key not in OF_STEPS}
    asked = {
        "rows": found["rows"],
        "split": checkpoint["facts"]["validation_split"],
        "tokens": [policy.get("tokenizer"), policy["max_total_sequence_length"], config.get("template_sha256")],
        "loss": {} if by == "validation_accuracy" else loss,
    }
    return Scored(figure["after"], None, None, asked, None, is_exact=True)


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
    end = "highest" if VALIDATED.get(choice["by"], True) else "lowest"
    same = [each["name"] for each in others if each["content"] == best["content"]]
    tied = [each["name"] for each in others if each["tied"] and each["name"] not in same]
    left_out = [f"{each['name']} ({each['left_out']})" for each in others if each["left_out"]]
    also = {"the same weights": same, "tied": tied, "left out": left_out}
    more = "".join(f"; {what}: {', '.join(names)}" for what, names in also.items() if names)
    return f"{says} ({end} {best['score']:.3f}{bounds}){more}"


def main(
    results: Annotated[Path, "the folder with the candidates' directories"],
    stage: Annotated[str, "the stage of the variants or checkpoints"],
    by: Annotated[str, f"{HELD_OUT_MEAN}, {', '.join(VALIDATED)} or a task of the evaluation"],
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
