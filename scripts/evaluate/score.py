"""Score a stage's export on held-out rows by environment, beside the scores of the stage's start."""

import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
from transformers import PreTrainedModel
from transformers import logging as transformers_logging

from scripts.errors import UserError, warn
from scripts.evaluate.results import Answer, beside_model, beside_parent, write_results
from scripts.files import append_json, canonical_json, duration, read_json, sha256_file, sha256_text, write_json
from scripts.model.bfloat16 import type_to_score
from scripts.model.generate import Rollout, Sampler
from scripts.model.generation_settings import BY_RECIPE, followed_for, settings_asked
from scripts.model.loading import count_gpus, fresh_model, load_model
from scripts.model.processor import load_processor
from scripts.program import run_command_line
from scripts.recipe.gym_release import VERDICTS
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments, read_config
from scripts.recipe.site import GYM_PYTHON
from scripts.records import Evaluation, ExportRecord, read_if_there, read_lines, read_record
from scripts.rewards.episode import whole_text
from scripts.rewards.judging_code import hash_of_environment
from scripts.rewards.registry import (
    check_row,
    environment_factory,
    own_metrics,
    register,
    register_gym,
    scores,
    spec_of,
)
from scripts.rewards.verdict import Unjudged, described
from scripts.rows.chat_format import GENERATION, pin_date
from scripts.rows.jsonl import environment_of, read_rows
from scripts.rows.kinds import contract_of
from scripts.rows.prompts import Row, prompt_for_reading, render_prompt
from scripts.rows.request import PromptRow, problem_of
from scripts.rows.thoughts import Told
from scripts.stage.consistency import exported_model
from scripts.stage.measured import held_out_loss
from scripts.stage.scorings import SAMPLED, Batch
from scripts.stage.tables import ROLLOUTS, read_table, write_table
from scripts.stage.training_folder import TrainingFolder

EVERY = 20.0
Answered = dict[int, tuple[Any, ...]]
"""Reward, response, tokens, cut and own metrics by the rows' places."""


class Sampled:
    """The `responses` of a scoring under way, kept in a file from which a killed scoring goes on.

    `keys` name the policies with rows and settings, `key` the policy at work.
    """

    def __init__(self, scores: Path, keys: list[str], responses: int) -> None:
        self.path, self.key, self.responses = scores.with_suffix(SAMPLED), keys[0], responses
        self.batches = [batch for batch in read_lines(self.path, Batch) if batch["of"] in keys]
        self.done = self.kept = sum(len(batch["answers"]) for batch in self.batches)
        self.began = self.since = time.monotonic()
        self.told = 0.0
        print(f"held-out scores: {responses} responses, {self.kept} of them from an interrupted call", flush=True)

    @property
    def known(self) -> Answered:
        """The policy's answers so far."""
        kept = [item for batch in self.batches if batch["of"] == self.key for item in batch["answers"].items()]
        return {int(at): (reward if why is None else Unjudged(why), *rest) for at, (reward, why, *rest) in kept}

    def add(self, answers: Answered) -> None:
        """Keep a batch of answers, and tell the progress with the time left by the pace so far."""
        now = time.monotonic()
        kept = {at: (reward, getattr(reward, "why", None), *rest) for at, (reward, *rest) in answers.items()}
        self.batches.append({"of": self.key, "answers": kept, "seconds": now - self.since})
        append_json(self.path, self.batches[-1])
        self.done, self.since = self.done + len(answers), now
        if now - self.told >= EVERY or self.done == self.responses:
            left = (now - self.began) / (self.done - self.kept) * (self.responses - self.done)
            print(f"held-out scores: {self.done} of {self.responses} responses, {duration(left)} left", flush=True)
            self.told = now

    def finish(self) -> None:
        """Note the pace and remove the responses, which are in the scores now."""
        pace = {"responses": self.done, "seconds": sum(batch["seconds"] for batch in self.batches)}
        write_json(self.path.parent / "logs/scoring.json", pace)
        self.path.unlink(missing_ok=True)


def load_export(record: Path, accelerator: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """Load the model of an export's record, with its tokenizer or processor.

    `accelerator`: `cpu`, the node's GPUs (`cuda`), or its GPUs if there are any (`auto`).
    """
    folder = exported_model(record)
    device_map = "auto" if count_gpus(accelerator) else None
    dtype = type_to_score(folder, "cuda" if device_map else "cpu")
    return load_model(folder, dtype, device_map), load_processor(folder)


def rollouts(
    model: Any,
    processor: Any,
    rows: list[Row],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    max_tool_calling_iterations: int | None = None,
    done: Collection[int] = (),
    **more: Any,
) -> Iterator[dict[int, Rollout]]:
    """Sample a response to each row, by batches of the rows' places; `more` are arguments of the Sampler.

    Batches of places that are `done` are left out. Rows of environments with tools get an `EpisodeResponse`, whose
    turns share `max_new_tokens`.
    """
    sampler = Sampler(model, processor, max_new_tokens, temperature, seed, **more)
    has_tools = [environment_factory(row["agent_ref"]["name"]) is not None for row in rows]
    for several in sorted({*has_tools}):
        respond, places = sampler.respond, [place for place, has in enumerate(has_tools) if has == several]
        if several:
            from scripts.evaluate.turns import EpisodeRunner  # noqa: PLC0415 - imports TRL

            respond = EpisodeRunner(sampler, max_tool_calling_iterations).respond
        known = {index for index, place in enumerate(places) if place in done}
        for batch in respond([rows[place] for place in places], known):
            yield {places[index]: response for index, response in batch.items()}


def answer_rows(
    model: Any,
    processor: Any,
    splits: list[Path],
    decoding: dict[str, Any],
    sampled: Sampled | None = None,
    told: Told = None,
) -> list[Answer]:
    """Return a policy's responses to all rows of the validation splits with their rewards, in the rows' order.

    Answers that are `sampled` are taken from there, and others added. `told` marks the model's thoughts, which are no
    part of an answer. A split's folder bears the blend's name; UserError for two splits of a name and for a row without
    a score.
    """
    if len({split.resolve().parent.name for split in splits}) < len(splits):
        raise UserError(
            f"{', '.join(map(str, splits))}: two lie in folders of the same name, but the folder names the blend"
        )
    rows, origins, places = [], [], []
    for split in splits:
        for number, _, row in read_rows(split):
            environment = environment_of(row, split, number)
            if problem := _problem(row, processor, decoding.get("chat_template_kwargs", {})):
                raise UserError(
                    f"{split}:{number}: {problem}; a row that cannot be scored must leave the split, or its blend "
                    "evaluation.blends"
                )
            rows.append(row)
            places.append(f"{split}:{number}")
            origins.append((environment, split.resolve().parent.name, number))
    answers = sampled.known if sampled else {}
    for batch in rollouts(model, processor, rows, **decoding, done=answers, told=told):
        answered = [(rows[at], rollout.text) for at, rollout in batch.items()]
        rewards = scores(answered, [places[at] for at in batch], told)
        judged = zip(batch.items(), rewards, strict=True)
        found = {
            at: (reward, *rollout._replace(text=whole_text(rollout.text)), own_metrics(rows[at], rollout.text, told))
            for (at, rollout), reward in judged
        }
        if sampled:
            sampled.add(found)
        answers |= found
    return [
        Answer(*origin, prompt_for_reading(row), *answers[at], tags=spec_of(row).tags(row))
        for at, (origin, row) in enumerate(zip(origins, rows, strict=True))
    ]


def _problem(row: dict[str, Any], processor: Any, variables: dict[str, Any]) -> str | None:
    """Return why a row cannot be answered and scored, or None; a blend may allow rows that break their contract."""
    try:
        problem = check_row(row)
        render_prompt(row, processor, **variables)
        prompt_for_reading(row)
    except Exception as error:
        return problem_of(row, contract_of(row["agent_ref"]["name"]) or PromptRow) or described(error)
    return problem


def count_unjudged(answers: list[Answer]) -> dict[str, Any] | None:
    """Count the responses that could not be judged, with the place of the first; None: all were."""
    unjudged = [answer for answer in answers if isinstance(answer.reward, Unjudged)]
    if not unjudged:
        return None
    first = unjudged[0]
    return {"responses": len(unjudged), "first": f"{first.split}, row {first.line}: {first.reward.why}"}


def warn_of_followed(start: Path, followed: list[str]) -> None:
    """Warn where the scores before are an earlier commit's, sampled by the folder's settings too."""
    record = start.with_name({"test_rollouts.parquet": "test.json"}.get(start.name, "eval.json"))
    before = read_if_there(record, Evaluation) if start.suffix == ".parquet" else None
    if before is not None and "not_used" not in before:
        warn(
            f"{record}: an earlier version sampled these scores by {', '.join(followed)} of the model's "
            f"{GENERATION} too, so the change is not the stage's alone; delete the file to take them again"
        )


def validation_of(export: ExportRecord, training: TrainingFolder) -> dict[str, Any]:
    """Return what the training measured of held-out rows of written answers, as eval.json has it; else nothing."""
    is_own = training.is_in_store and "quantized" not in export
    found = held_out_loss(training.steps, export["step"]) if is_own else None
    return {"validation": found} if found else {}


def main(
    recipe: Path,
    export: Annotated[Path, "the stage's hf/record.json"],
    start: Annotated[
        Path,
        "the stage's start: rollouts.parquet of a scored parent; else hf/record.json, or config.yaml of a fresh model, "
        "to be scored as well",
    ],
    validation: Annotated[list[Path], "validation splits (JSONL)"],
    rollouts: Annotated[Path, "rollouts.parquet, to be written"],
    output: Annotated[Path, "eval.json"],
    threads: int = 2,
    accelerator: Annotated[Literal["auto", "cuda", "cpu"], "device of the model"] = "cpu",
    gym_python: Annotated[str, "the Python of the environment with NeMo-Gym"] = GYM_PYTHON,
    settings: Annotated[Path | None, "the file of the evaluation's settings, to be noted"] = None,
) -> None:
    """Score an export, or write earlier scores again."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    loaded = load_recipe(recipe)
    evaluation, own = loaded.evaluation, own_environments(loaded)
    register(own)
    if evaluation.gym:
        register_gym(evaluation.gym, evaluation.gym_servers, gym_python)
    decoding, is_export = evaluation.decoding, start.suffix == ".json"
    told = loaded.model.thoughts
    pin_date(loaded.model.template_date)
    asked = {
        "decoding": decoding,
        "environments": {name: hash_of_environment(path) for name, path in own.items()},
        "gym": repr((evaluation.gym, evaluation.gym_servers)),
        "export": read_record(export, ExportRecord)["content"],
        "splits": [[path.parent.name, path.name, sha256_file(path)] for path in validation],
        "start": [start.name, read_record(start, ExportRecord)["content"] if is_export else sha256_file(start)],
        **loaded.model.reading,
    }
    folder, written = export.parent / "model", (decoding, rollouts, output)
    unused = settings_asked(folder)
    more = {"start": start.name} | ({"settings": read_json(settings)} if settings else {})
    more |= {"not_used": unused} if unused else {}
    if evaluation.gym:
        more["gym_verdicts"] = VERDICTS
    if followed := followed_for(folder, decoding):
        asked["sampled"] = BY_RECIPE
        warn_of_followed(start, followed)
    training = TrainingFolder.behind(export.with_name("model"))
    if output.name == "eval.json":
        more |= validation_of(read_record(export, ExportRecord), training)
    name = f"{sha256_text(canonical_json(asked))[:16]}.parquet"
    kept = training.path / "scores" / name if training.is_in_store else None
    if kept is not None and kept.exists():
        print(f"the scores are {kept}, from an earlier call", flush=True)
        write_results(export, read_table(kept, ROLLOUTS), *written, told=told, **more)
        return output.with_suffix(SAMPLED).unlink(missing_ok=True)
    by = {"torch": torch.__version__, "transformers": transformers.__version__, "gpus": count_gpus(accelerator) > 0}
    policies = ("export",) if start.suffix == ".parquet" else ("export", "start")
    keys = [sha256_text(canonical_json([asked, by, policy])) for policy in policies]
    sampled = Sampled(output, keys, len(keys) * sum(1 for path in validation for _ in read_rows(path)))
    answers = partial(answer_rows, splits=validation, decoding=decoding, sampled=sampled, told=told)
    after = answers(*load_export(export, accelerator))
    unjudged = count_unjudged(after)
    if unjudged:
        says = f"{unjudged['responses']} of {len(after)} responses could not be judged and earn 0"
        warn(f"{says}; the first, to {unjudged['first']}")
    if start.suffix == ".parquet":
        table = beside_parent(after, read_table(start, ROLLOUTS))
    else:
        sampled.key = keys[1]
        model = load_export(start, accelerator) if is_export else fresh_model(read_config(start))
        table = beside_model(after, answers(*model))
    if kept is not None and not unjudged:
        write_table(table, kept)
    more |= {"unjudged": unjudged} if unjudged else {}
    write_results(export, table, *written, told=told, **more)
    sampled.finish()


if __name__ == "__main__":
    run_command_line(main)
