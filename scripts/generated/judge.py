"""Reward the sampled responses of a generated blend, by the environments of the prompts and a reward model if named."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from scripts.errors import warn
from scripts.files import canonical_json, sha256_file, sha256_text
from scripts.generated.sample import RESPONSES, Kept, prompts_in
from scripts.program import run_command_line
from scripts.recipe.generated import judging_of
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.site import GYM_PYTHON
from scripts.records import ExportRecord, read_record
from scripts.rewards.answers import answer_of
from scripts.rewards.registry import register, register_gym, reward_groups
from scripts.rewards.verdict import Unjudged
from scripts.rows.chat_format import pin_date
from scripts.rows.jsonl import environment_named
from scripts.rows.messages import Row, tools_of
from scripts.rows.prompts import prompt_of, render
from scripts.rows.thoughts import Told, split_response
from scripts.stage.tables import read_table, write_table

AT_ONCE = 32
"""Prompts whose responses are judged side by side; a kill loses as many."""
JUDGED = pa.schema(
    [
        *RESPONSES,
        pa.field("environment", pa.string()),  # null: the prompt names none
        pa.field("reward", pa.float64()),  # null: no environment, or not judged
        pa.field("why", pa.string()),  # why it could not be judged
        pa.field("score", pa.float64()),  # by select.rank's reward model; null: there is none, or no answer
        pa.field("unfinished", pa.bool_()),  # whether its thoughts do not end; it earns 0. Null: not looked at
    ]
)
Group = tuple[int, Row, list[str]]
"""A prompt's line, its row and its responses."""
Scores = Callable[[Row, list[str]], list[float]]


def rewards_of(groups: list[Group], split: Path, told: Told = None) -> list[list[Any]]:
    """Return reward and reason of no verdict for each response, by group; both None without an environment.

    `told` marks the models' thoughts, which no verifier gets.
    """
    rewarded = [(line, row, texts) for line, row, texts in groups if environment_named(row)]
    places = [f"{split}:{line}" for line, *_ in rewarded]
    judged = iter(reward_groups([(row, texts) for _, row, texts in rewarded], places, told=told))
    return [
        [(None, reward.why) if isinstance(reward, Unjudged) else (float(reward), None) for reward in next(judged)]
        if environment_named(row)
        else [(None, None)] * len(texts)
        for _, row, texts in groups
    ]


def judge(
    groups: list[Group], split: Path, scores_of: Scores | None, folder: Path, told: Told = None
) -> Iterator[list[tuple[float | None, str | None, float | None]]]:
    """Yield reward, reason of no verdict, and score of each response, by group; `folder` keeps a killed call's.

    `told` marks the models' thoughts; verifiers and `scores_of` get the answers.
    """
    kept = Kept(folder, "prompts to judge", set(range(len(groups))))
    left = [place for place in range(len(groups)) if place not in kept.answers]
    for several in (left[start : start + AT_ONCE] for start in range(0, len(left), AT_ONCE)):
        chosen = [groups[place] for place in several]
        answers = {}
        for place, (_, row, texts), judged in zip(several, chosen, rewards_of(chosen, split, told), strict=True):
            scores = _ranked(row, texts, scores_of, told) if scores_of else [None] * len(texts)
            answers[place] = [[*each, score] for each, score in zip(judged, scores, strict=True)]
        kept.add(answers)
    return (kept.answers[place] for place in range(len(groups)))


def _ranked(row: Row, texts: list[str], scores_of: Scores, told: Told) -> list[float | None]:
    """Return the scores of the answers in responses; None where the thoughts do not end."""
    found = [answer_of(text, told) for text in texts]
    answers = [answer for answer in found if answer is not None]
    scores = iter(scores_of(row, answers) if answers else ())
    return [None if answer is None else next(scores) for answer in found]


def main(
    recipe: Path,
    blend: Annotated[str, "the generated blend"],
    prompts: Annotated[Path, "the training split of the prompts"],
    responses: Annotated[list[Path], "Parquet files of the responses, a shard each"],
    store: Annotated[Path, "folder of the verdicts of all calls"],
    output: Annotated[Path, "judged.parquet"],
    ranker: Annotated[Path | None, "hf/record.json of the reward model of select.rank"] = None,
    gym_python: Annotated[str, "the Python of the environment with NeMo-Gym"] = GYM_PYTHON,
    threads: int = 2,
    accelerator: Annotated[str, "device of the reward model"] = "cpu",
) -> None:
    """Write judged.parquet: every response with its reward."""
    loaded = load_recipe(recipe)
    pin_date(loaded.model.template_date)
    own, judging, told = own_environments(loaded), judging_of(loaded, blend), loaded.model.thoughts
    register(own)
    if judging.gym:
        register_gym(judging.gym, judging.gym_servers, gym_python)
    table = pa.concat_tables(read_table(path, RESPONSES) for path in responses)
    table = table.sort_by([(name, "ascending") for name in ("line", "model", "sample")])
    kind = loaded.blends[loaded.blends[blend].generated.prompts].kind
    asked, rows = {*table["line"].to_pylist()}, table.to_pylist()
    by_line = {prompt.line: prompt.row for prompt in prompts_in(prompts, kind) if prompt.line in asked}
    texts: dict[int, list[str]] = {}
    for row in rows:
        texts.setdefault(row["line"], []).append(row["response"])
    groups = [(line, by_line[line], answers) for line, answers in texts.items()]
    by = {
        "gym": judging.model_dump(mode="json", include={"gym"}),
        "environments": {name: sha256_file(path) for name, path in own.items()},
        "ranker": read_record(ranker, ExportRecord)["content"] if ranker else None,
        **loaded.model.reading,
    }
    responses_sha256 = sha256_text(canonical_json(rows))
    folder = store / sha256_text(canonical_json([by, responses_sha256]))[:16]
    scores_of = scores_by(ranker, accelerator, threads) if ranker else None
    judged = [each for group in judge(groups, prompts, scores_of, folder, told) for each in group]
    unjudged = [(row, why) for row, (_, why, _) in zip(rows, judged, strict=True) if why]
    if unjudged:
        first, why = unjudged[0]
        warn(
            f"{blend}: {len(unjudged)} of {len(rows)} responses could not be judged, and make no row; the first, to "
            f"{prompts}:{first['line']}: {why}"
        )
    for row, (reward, why, score) in zip(rows, judged, strict=True):
        row |= {"environment": environment_named(by_line[row["line"]]), "reward": reward, "why": why, "score": score}
        row["unfinished"] = split_response(row["response"], told).is_unfinished
    if unfinished := sum(row["unfinished"] for row in rows):
        warn(f"{blend}: the thoughts of {unfinished} of {len(rows)} responses do not end, which earns 0")
    write_table(pa.Table.from_pylist(rows, schema=JUDGED), output)


def scores_by(export: Path, accelerator: str, threads: int) -> Scores:
    """Return the function that scores responses by a reward model, read in the reward model's own chat template."""
    import torch  # noqa: PLC0415 - only where a reward model ranks
    from transformers import logging  # noqa: PLC0415

    from scripts.evaluate.score import load_export  # noqa: PLC0415

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model, tokenizer = load_export(export, accelerator)
    model.eval()

    @torch.inference_mode()
    def scores(row: Row, responses: list[str]) -> list[float]:
        texts = [
            render([*prompt_of(row), {"role": "assistant", "content": text}], tokenizer, tools=tools_of(row))
            for text in responses
        ]
        options = {"padding": True, "padding_side": "right", "add_special_tokens": False, "return_tensors": "pt"}
        return model(**tokenizer(text=texts, **options).to(model.device)).logits[:, 0].float().tolist()

    return scores


if __name__ == "__main__":
    run_command_line(main)
