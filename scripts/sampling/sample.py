"""Sample the responses of models to one shard of a generated blend's prompts: training rows, none of them held out."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pyarrow as pa

from scripts.errors import LongError
from scripts.evaluate.gate import words_of_stop
from scripts.files import canonical_json, sha256_text, write_json
from scripts.installed import version_of
from scripts.model.generation_settings import BY_RECIPE, followed_for, settings_asked
from scripts.program import run_command_line
from scripts.recipe.generated import GeneratedSource
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments
from scripts.records import ExportRecord, read_record
from scripts.rewards.registry import environment_factory, register
from scripts.rows.chat_format import pin_date
from scripts.rows.jsonl import environment_named, read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.messages import Row
from scripts.rows.thoughts import Told
from scripts.sampling.kept import Kept, folder_of_answers, parsed, read_trusted
from scripts.stage.consistency import exported_model
from scripts.stage.paths import StagePaths
from scripts.stage.store import group_number
from scripts.stage.tables import write_table

if TYPE_CHECKING:
    from scripts.model.generate import Sampler
    from scripts.sampling.vllm_engine import VllmEngine

    Engine = Sampler | VllmEngine

ENGINES = {"transformers": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}
"""The packages whose versions decide an engine's responses."""
OF_TURNS = "max_tool_calling_iterations"
"""A setting of responses of several turns, of which none are sampled here."""
PLAN = "batches.json"
RESPONSES = pa.schema(
    {
        "model": pa.int64(),  # its place in the source's `by`
        "line": pa.int64(),  # of the prompt in its training split, from 1
        "sample": pa.int64(),  # from 0
        "response": pa.string(),
        "tokens": pa.int64(),  # before the end token
        "cut": pa.bool_(),  # by the length limit
    }
)


@dataclass(frozen=True)
class Prompt:
    """A training row's line in its split, its prompt's hash, and the row as an environment reads it."""

    line: int
    sha256: str
    row: Row


def prompts_in(split: Path, kind: str) -> Iterator[Prompt]:
    """Yield the prompts of a split whose rows are of a kind; rows of other kinds keep prompt and tools alone."""
    for line, _, row in read_rows(split):
        example = KINDS[kind].example(row)
        sha256 = sha256_text(canonical_json([example.prompt, example.tools]))
        yield Prompt(line, sha256, KINDS[kind].as_prompt(row))


def prompts_of(
    source: GeneratedSource, split: Path, kind: str, held_out: dict[Path, str]
) -> tuple[list[Prompt], Counter[str]]:
    """Return the prompts of a source's part, and the number of left-out ones by reason.

    `held_out` are the kinds of the splits no prompt of which may come in. Rows of environments with tools are left out,
    since a response of several turns is no single message.
    """
    kept_out = {prompt.sha256 for path, its_kind in held_out.items() for prompt in prompts_in(path, its_kind)}
    (number, parts), kept, left_out = source.share, list[Prompt](), Counter[str]()
    for prompt in prompts_in(split, kind):
        if int(prompt.sha256[:15], 16) % parts != number:
            continue
        if prompt.sha256 in kept_out:
            left_out["prompts that are held out"] += 1
        elif environment_factory(environment_named(prompt.row) or ""):
            left_out["prompts of environments with tools"] += 1
        else:
            kept.append(prompt)
    return kept, left_out


def is_response(answer: list[Any]) -> bool:
    """Whether an answer that was kept is a response: its text, its tokens, and whether it was cut."""
    return len(answer) == 3 and [type(part) for part in answer] == [str, int, bool]


def _planned_batches(path: Path, trusted: int | None) -> list[list[int]] | None:
    """Return the batches that a shard before wrote down; None where there are none, or they are a stranger's."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(parsed(read_trusted(path, trusted)), list[list[int]])
    return None


def engine_of(
    name: str, export: Path, decoding: dict[str, Any], accelerator: str, threads: int, told: Told = None
) -> "Engine":
    """Load an export's model in an engine; `told` marks the model's thoughts."""
    import torch  # noqa: PLC0415 - what is sampled already needs no model
    from transformers import logging  # noqa: PLC0415

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    decoding = {key: value for key, value in decoding.items() if key != OF_TURNS}
    if name == "vllm":
        from scripts.sampling.vllm_engine import VllmEngine  # noqa: PLC0415

        return VllmEngine(exported_model(export), **decoding, told=told)
    from scripts.evaluate.score import load_export  # noqa: PLC0415
    from scripts.model.generate import Sampler  # noqa: PLC0415

    return Sampler(*load_export(export, accelerator), **decoding, told=told)


def has_gpus(accelerator: str) -> bool:
    """Whether a site's accelerator is GPUs here; UserError for `cuda` without any."""
    if accelerator == "cpu":
        return False
    from scripts.model.loading import count_gpus  # noqa: PLC0415

    return count_gpus(accelerator) > 0


def sample(
    load: "Callable[[], Engine]",
    prompts: list[Prompt],
    samples: int,
    shard: tuple[int, int],
    folder: Path,
    about: str,
    trusted: int | None = None,
) -> tuple[list[dict[str, Any]], int]:
    """Return the responses of one shard (`shard`: number from 0, shards) by prompt and sample, and how many are new.

    The shards share an engine's batches, which the first to come writes down, so their number changes no response.
    `folder` keeps the batches, and the responses of all calls; the engine is loaded where one is missing. Files of
    others count where they are of the group `trusted`.
    """
    rows, (number, shards), engine = [prompt.row for prompt in prompts for _ in range(samples)], shard, None
    plan = _planned_batches(folder / PLAN, trusted)
    if plan is None:
        engine = load()
        plan = engine.plan(rows)
        write_json(folder / PLAN, plan)
    wanted = {place for batch in plan[number::shards] for place in batch}
    kept = Kept[int](folder, is_response, trusted=trusted)
    kept.begin(about, wanted)
    if kept.done < len(wanted):
        engine = engine or load()
        for responses in engine.respond(rows, kept.answers.keys() | set(range(len(rows))) - wanted):
            kept.add({place: [*rollout] for place, rollout in responses.items()})
    names = ("line", "sample", "response", "tokens", "cut")
    found = [
        dict(zip(names, (prompts[place // samples].line, place % samples, *kept.answers[place]), strict=True))
        for place in sorted(wanted)
    ]
    return found, len(wanted) - kept.earlier


def main(
    recipe: Path,
    blend: Annotated[str, "the generated blend"],
    exports: Annotated[list[Path], "hf/record.json of each model, in the recipe's order"],
    prompts: Annotated[Path, "the training split of the prompts"],
    held_out: Annotated[list[Path], "splits whose prompts may not come in, in folders named by blend"],
    shard: Annotated[str, "which shard, as 1-of-4"],
    store: Annotated[Path, "folder of the responses of all calls"],
    output: Annotated[Path, "Parquet file of the responses"],
    gates: Annotated[list[Path], "gate.json of the stages among the models"] = (),
    engine: Annotated[Literal["transformers", "vllm"], "what samples"] = "transformers",
    threads: int = 2,
    accelerator: Annotated[Literal["auto", "cuda", "cpu"], "device of the models"] = "cpu",
    group: Annotated[str | None, "Unix group whose members' responses count as one's own"] = None,
) -> None:
    """Sample a shard's responses of every model; UserError where the gate of one says stop."""
    if stopped := list(filter(None, (words_of_stop(StagePaths(gate.parent)) for gate in gates))):
        raise LongError("\n  ".join([f"blend {blend} is not sampled:", *stopped]))
    loaded = load_recipe(recipe)
    pin_date(loaded.model.template_date)
    register(own_environments(loaded))
    source = loaded.generated[blend].source
    kinds = {path: loaded.blends[path.parent.name].kind for path in held_out}
    asked, left_out = prompts_of(source, prompts, loaded.blends[source.prompts].kind, kinds)
    number, _, shards = shard.partition("-of-")
    packages = {name: version_of(name) for name in ENGINES[engine]} | {"gpus": has_gpus(accelerator)}
    lines = [[prompt.line, prompt.sha256] for prompt in asked]
    rows, began, sampled, not_used = [], time.monotonic(), 0, dict[str, Any]()
    trusted = group_number(group)
    for place, (name, export) in enumerate(zip(source.models, exports, strict=True)):
        content = read_record(export, ExportRecord)["content"]
        folder, question = export.parent / "model", [content, source.decoding, source.samples, lines, packages]
        if unused := settings_asked(folder):
            not_used[name] = unused
        if engine == "transformers" and followed_for(folder, source.decoding):
            question.append(BY_RECIPE)
        if loaded.model.reading:
            question.append(loaded.model.reading)
        identity = sha256_text(canonical_json(question))[:16]
        load = partial(engine_of, engine, export, source.decoding, accelerator, threads, loaded.model.thoughts)
        shared = int(number) - 1, int(shards)
        kept_in = folder_of_answers(store, identity, trusted)
        responses, new = sample(load, asked, source.samples, shared, kept_in, f"responses of {name}", trusted)
        sampled += new
        rows += [{"model": place, **response} for response in responses]
    write_table(pa.Table.from_pylist(rows, schema=RESPONSES), output)
    pace = {"responses": sampled, "seconds": round(time.monotonic() - began, 1)} if sampled else {}
    settings = {"decoding": source.decoding} | ({"not_used": not_used} if not_used else {})
    write_json(output.with_suffix(".json"), {"prompts": len(asked), "left_out": dict(left_out), **settings, **pace})


if __name__ == "__main__":
    run_command_line(main)
