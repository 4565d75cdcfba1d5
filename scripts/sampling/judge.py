"""Reward the sampled responses of a generated blend, by the environments of the prompts and a reward model if named."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

from scripts.errors import UserError, warn
from scripts.files import canonical_json, sha256_text, write_json
from scripts.program import run_command_line
from scripts.recipe.generated import Rank
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.site import GYM_PYTHON
from scripts.records import ExportRecord, LeftUnjudged, read_if_there, read_record
from scripts.rewards.answers import answer_of
from scripts.rewards.registry import register, register_gym, reward_groups
from scripts.rewards.verdict import Unjudged
from scripts.rows.chat_format import pin_date
from scripts.rows.jsonl import environment_named
from scripts.rows.messages import Row, tools_of
from scripts.rows.prompts import prompt_of, render
from scripts.rows.thoughts import Told, split_response
from scripts.sampling.kept import Kept, folder_of_answers, is_finite
from scripts.sampling.sample import RESPONSES, prompts_in
from scripts.sampling.verdicts import Asked, Judges, asked_of, is_verdict, renewed
from scripts.stage.data_settings import UNJUDGED
from scripts.stage.store import group_number
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
Scores = Callable[[Row, list[str]], list[float]]


class Verdict(NamedTuple):
    """A response's reward and score; `why` says why one of them is missing."""

    reward: float | None
    why: str | None
    score: float | None


def rewards_of(groups: list[Asked], split: Path, told: Told = None, judged_before: bool = False) -> list[list[float]]:
    """Return the rewards of each group's responses, an Unjudged where there is none.

    `told` marks the models' thoughts, which no verifier gets. UserError where a user's environment judges none of them,
    unless it judged others before (`judged_before`).
    """
    places = [f"{split}:{group.line}" for group in groups]
    answered = [(group.row, group.texts) for group in groups]
    return reward_groups(answered, places, told=told, judged_before=judged_before)


def judge(
    groups: list[Asked],
    split: Path,
    scores_of: Scores | None,
    kept: Kept[str],
    told: Told = None,
) -> Iterator[list[Verdict]]:
    """Yield the verdicts on each group's responses; those that are `kept` are not asked for again, others are added.

    `told` marks the models' thoughts; verifiers and `scores_of` get the answers.
    """
    kept.begin("verdicts", {key for group in groups for key in (*(group.rewards or ()), *(group.scores or ()))})
    for start in range(0, len(groups), AT_ONCE):
        several = groups[start : start + AT_ONCE]
        why = _reward(several, split, kept, told) | _score(several, scores_of, kept, told)
        for group in several:
            yield [_verdict(group, place, kept.answers, why) for place in range(len(group.texts))]


def _verdict(group: Asked, place: int, answers: dict[str, Any], why: dict[str, str]) -> Verdict:
    """Return the verdict on a response, of the answers by key and the reasons for missing ones."""
    reward_key = group.rewards[place] if group.rewards else None
    score_key = group.scores[place] if group.scores else None
    (reward,), (score,) = (answers.get(key, [None]) for key in (reward_key, score_key))
    reason = why.get(reward_key) or why.get(score_key)
    return Verdict(reward, reason, score)


def _reward(groups: list[Asked], split: Path, kept: Kept[str], told: Told) -> dict[str, str]:
    """Keep the missing rewards of groups; return the reasons of those that are still missing, by key."""
    missing = [left for group in groups if (left := _without(group, group.rewards, kept)) is not None]
    found, why = dict[str, list[float]](), dict[str, str]()
    judged = rewards_of(missing, split, told, judged_before=kept.done > 0)
    for group, rewards in zip(missing, judged, strict=True):
        for key, reward in zip(group.rewards, rewards, strict=True):
            if isinstance(reward, Unjudged):
                why[key] = reward.why
            else:
                found[key] = [float(reward)]
    kept.add(found)
    return why


def _score(groups: list[Asked], scores_of: Scores | None, kept: Kept[str], told: Told) -> dict[str, str]:
    """Keep the missing scores of groups; return the reasons of those that are no number, by key."""
    found, why = dict[str, list[float]](), dict[str, str]()
    for group in groups:
        left = _without(group, group.scores, kept) if scores_of else None
        if left is None:
            continue
        for key, score in zip(left.scores, _ranked(left.row, left.texts, scores_of, told), strict=True):
            if score is None:
                continue
            if is_finite(score):
                found[key] = [score]
            else:
                why[key] = f"the reward model's score is {score}"
    kept.add(found)
    return why


def _without(group: Asked, keys: list[str] | None, kept: Kept[str]) -> Asked | None:
    """Return a group with only the responses whose verdicts are not kept; None where all are, or none are asked for."""
    places = [place for place, key in enumerate(keys or ()) if key not in kept.answers]
    if not places:
        return None

    def picked(values: list[str] | None) -> list[str] | None:
        return values and [values[place] for place in places]

    return replace(group, texts=picked(group.texts), rewards=picked(group.rewards), scores=picked(group.scores))


def _ranked(row: Row, texts: list[str], scores_of: Scores, told: Told) -> list[float | None]:
    """Return the scores of the answers in responses; None where the thoughts do not end."""
    found = [answer_of(text, told) for text in texts]
    answers = [answer for answer in found if answer is not None]
    scores = iter(scores_of(row, answers) if answers else ())
    return [None if answer is None else next(scores) for answer in found]


def note_unjudged(path: Path, of: str, responses: int) -> None:
    """Write down how many responses have no verdict, so that the next call of Snakemake asks for them again.

    A call that asks again and gets none of the missing verdicts is the last: they count as impossible. `of` names the
    responses.
    """
    before = read_if_there(path, LeftUnjudged)
    calls = before["calls"] if before else 0
    is_same = before is not None and before["of"] == of and before["responses"] > 0
    if responses and not (is_same and responses >= before["responses"]):
        calls += 1
    if before is not None or responses:
        write_json(path, {"of": of, "responses": responses, "calls": calls})


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
    group: Annotated[str | None, "Unix group whose members' verdicts count as one's own"] = None,
) -> None:
    """Write judged.parquet: every response with its reward."""
    loaded = load_recipe(recipe)
    pin_date(loaded.model.template_date)
    own, judging, told = own_environments(loaded), loaded.graph.rows(blend).judging, loaded.model.thoughts
    register(own)
    if judging.gym:
        register_gym(judging.gym, judging.gym_servers, gym_python)
    table = pa.concat_tables(read_table(path, RESPONSES) for path in responses)
    table = table.sort_by([(name, "ascending") for name in ("line", "model", "sample")])
    rows, kind = table.to_pylist(), loaded.blends[loaded.generated[blend].source.prompts].kind
    by_line = _prompts_of_responses(prompts, kind, rows)
    texts: dict[int, list[str]] = {}
    for row in rows:
        texts.setdefault(row["line"], []).append(row["response"])

    # The verdicts of all calls on these responses, by all that each depends on.
    content = read_record(ranker, ExportRecord)["content"] if ranker else None
    judges = Judges(own, judging, gym_python, loaded.model.reading, content)
    of = sha256_text(canonical_json(["verdicts", rows]))[:16]
    trusted = group_number(group)
    kept = Kept[str](folder_of_answers(store, of, trusted), is_verdict, str, trusted)
    asked = [asked_of(judges, line, by_line[line], each) for line, each in texts.items()]
    asked = renewed(asked, judges, kept, lambda some: rewards_of(some, prompts, told, judged_before=True))
    scores_of = scores_by(ranker, accelerator, threads) if ranker else None
    verdicts = [verdict for group in judge(asked, prompts, scores_of, kept, told) for verdict in group]

    _refuse_ranker_without_scores(blend, loaded.generated[blend].select.rank, rows, verdicts, told)
    unjudged = [(row, verdict.why) for row, verdict in zip(rows, verdicts, strict=True) if verdict.why]
    if unjudged:
        first, why = unjudged[0]
        warn(
            f"{blend}: {len(unjudged)} of {len(rows)} responses could not be judged, and make no row; the first, to "
            f"{prompts}:{first['line']}: {why}"
        )
    for row, verdict in zip(rows, verdicts, strict=True):
        row |= {"environment": environment_named(by_line[row["line"]]), **verdict._asdict()}
        row["unfinished"] = split_response(row["response"], told).is_unfinished
    if unfinished := sum(row["unfinished"] for row in rows):
        warn(f"{blend}: the thoughts of {unfinished} of {len(rows)} responses do not end, which earns 0")
    write_table(pa.Table.from_pylist(rows, schema=JUDGED), output)
    note_unjudged(output.with_name(UNJUDGED), of, len(unjudged))


def _prompts_of_responses(prompts: Path, kind: str, responses: list[dict[str, Any]]) -> dict[int, Row]:
    """Return the rows of the prompts that were asked, by line, as an environment gets them."""
    asked = {response["line"] for response in responses}
    by_line = {prompt.line: prompt.row for prompt in prompts_in(prompts, kind) if prompt.line in asked}
    if gone := sorted(asked - by_line.keys()):
        raise UserError(
            f"{prompts}: has no line {gone[0]}, to which there are responses ({len(gone)} such lines); the rows have "
            "changed since: start Snakemake, which samples again"
        )
    return by_line


def _refuse_ranker_without_scores(
    blend: str, rank: Rank | None, rows: list[dict[str, Any]], verdicts: list[Verdict], told: Told
) -> None:
    """UserError where a reward model gives no response a finite score: its weights are broken."""
    if rank is None or any(verdict.score is not None for verdict in verdicts):
        return
    answers = [row for row in rows if answer_of(row["response"], told) is not None]
    if answers:
        raise UserError(
            f"blends.{blend}.select.rank: {rank.by} gives none of {len(answers)} responses a finite score, so nothing "
            "can be chosen by it; look at its training (metrics.parquet), and name another reward model"
        )


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
