"""What was chosen, in words: scores of what was chosen by them flatter, and the test split's figure does not."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.records import CheckpointRecord, Choice, Evaluation, read_if_there, read_record
from scripts.stage.paths import StagePaths


def words_of(choice: Choice) -> str:
    """A choice in a line: chosen among what, by what, tied with which, and what was left out."""
    candidates, best = choice["candidates"], choice["candidates"][0]
    bounds = "" if best["low"] is None else f", 95 % interval {best['low']:.3f} to {best['high']:.3f}"
    says = f"{choice['stage']}: {', '.join(choice['chosen'])} chosen among {len(candidates)} by {choice['by']}"
    says += f" (highest {best['score']:.3f}{bounds})"
    if tied := ", ".join(each["name"] for each in candidates if each["tied"]):
        says += f"; tied with {best['name']}: {tied}"
    left_out = ", ".join(f"{each['name']} ({each['left_out']})" for each in candidates if each["left_out"])
    return f"{says}; left out: {left_out}" if left_out else says


def selections(results: Path, chain: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """What of a chain was chosen: its name, by what, and among how many, those that halving dropped included."""
    records = [read_if_there(StagePaths(results / name).record, CheckpointRecord) for name in chain]
    trained = {(record["identity"], record["step"]) for record in records if record}
    choices = [read_record(path, Choice) for path in sorted(results.glob("*/choice.json"))]
    for choice in choices:
        among = max(len(other["candidates"]) for other in choices if other["stage"] == choice["stage"])
        for each in choice["candidates"]:
            if among > 1 and each["name"] in choice["chosen"] and (each["identity"], each["step"]) in trained:
                yield each["name"], choice["by"], among


def selection_sentences(results: Path, chain: list[str]) -> list[str]:
    """What to know before believing the scores of a chain's last stage; `chain`: names of folders, parents first."""
    says = [
        f"{name} was chosen among {among} by {by}, on the rows that scores are shown for, so they flatter."
        for name, by, among in dict.fromkeys(selections(results, chain))
    ]
    test = read_if_there(StagePaths(results / chain[-1]).test, Evaluation)
    if test is None:
        honest = "A figure that nothing was chosen by: evaluation.test: true in the recipe, and test: N in a blend."
        return [*says, honest] if says else []
    mean, change = test["mean"], test["mean"]["change"]
    interval = (
        f" ({change['value']:+.2f}, 95 % interval {change['low']:+.2f} to {change['high']:+.2f})" if change else ""
    )
    return [*says, f"On the test split {chain[-1]} went from {mean['before']:.2f} to {mean['after']:.2f}{interval}."]
