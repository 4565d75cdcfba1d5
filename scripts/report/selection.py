"""Sentences on a choice: scores that chose a stage overestimate it, the test split's score does not."""

from pathlib import Path

from scripts.records import CheckpointRecord, Choice, Evaluation, read_if_there, read_record
from scripts.stage.paths import StagePaths


def selection_sentences(results: Path, chain: list[str]) -> list[str]:
    """Return the warnings on the scores of a chain's last stage; `chain`: folders' names, parents first."""
    records = [read_if_there(StagePaths(results / name).record, CheckpointRecord) for name in chain]
    trained = [(record["identity"], record["step"]) for record in records if record]
    says, ends = [], [StagePaths(results / chain[-1])]
    for path in sorted(results.glob("*/choice.json")):
        choice = read_record(path, Choice)
        among = len(choice["candidates"])
        for each in choice["candidates"]:
            key = each["identity"], each["step"]
            if among > 1 and each["name"] in choice["chosen"] and key in trained:
                chosen = f"{each['name']} was chosen among {among} by {choice['by']}"
                says.append(f"{chosen}, on the rows scored here, so the scores overestimate it.")
                ends += [StagePaths(path.parent)] if key == trained[-1] else []
    test = next((found for folder in ends if (found := read_if_there(folder.test, Evaluation))), None)
    if test is not None:
        mean, change = test["mean"], test["mean"]["change"]
        figure = f"{mean['after']:.2f} after {chain[-1]}, {mean['before']:.2f} of the model that the chain started from"
        if change:
            figure += f" ({change['value']:+.2f}, 95 % interval {change['low']:+.2f} to {change['high']:+.2f})"
        says.append(f"On the test split, which no choice has used: {figure}.")
    elif says:
        says.append("For a score without this bias, set evaluation.test: true in the recipe and test: N in a blend.")
    return list(dict.fromkeys(says))
