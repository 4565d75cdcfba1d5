"""Sample the responses of models to one shard of a generated blend's prompts."""

import time
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import pyarrow as pa
import torch
from transformers import logging as transformers_logging

from scripts.evaluate.score import load_export
from scripts.files import canonical_json, sha256_text, write_json
from scripts.generated.asked import Prompt, prompts_of
from scripts.generated.kept import Kept
from scripts.generated.schemas import RESPONSES
from scripts.model.generate import Rollout, Sampler
from scripts.model.loading import count_gpus
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import own_environments
from scripts.records import ExportRecord, read_record
from scripts.rewards.registry import register
from scripts.rows.prompts import Row
from scripts.stage.consistency import exported_model
from scripts.stage.tables import write_table

ENGINES = {"transformers": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}
"""The packages whose versions decide an engine's responses."""


class Engine(Protocol):
    """What samples: scripts.model.generate's Sampler, or vLLM."""

    def plan(self, rows: list[Row]) -> list[list[int]]:
        """Return the rows' places by batches."""

    def respond(self, rows: list[Row], done: Collection[int] = ()) -> Iterator[dict[int, Rollout]]:
        """Yield responses by the rows' places; batches that are `done` are left out."""


def engine_of(name: str, export: Path, decoding: dict[str, Any], accelerator: str) -> Engine:
    """Load an export's model in an engine."""
    if name == "vllm":
        from scripts.generated.vllm_engine import VllmEngine  # noqa: PLC0415 - vLLM is where the site names its Python

        return VllmEngine(exported_model(export), **decoding)
    return Sampler(*load_export(export, accelerator), **decoding)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def sample(
    engine: Engine, prompts: list[Prompt], samples: int, shard: tuple[int, int], folder: Path, about: str
) -> tuple[list[dict[str, Any]], int]:
    """Return the responses of one shard (`shard`: number from 0, shards) by prompt and sample, and how many are new.

    The shards share an engine's batches, so their number changes no response. `folder` keeps the responses of a call
    that was killed, and of all earlier calls.
    """
    rows = [prompt.row for prompt in prompts for _ in range(samples)]
    number, shards = shard
    wanted = {place for batch in engine.plan(rows)[number::shards] for place in batch}
    kept = Kept(folder, about, wanted)
    for responses in engine.respond(rows, kept.answers.keys() | set(range(len(rows))) - wanted):
        kept.add({place: [*rollout] for place, rollout in responses.items()})
    responses = [
        {
            "line": prompts[place // samples].line,
            "sample": place % samples,
            "response": text,
            "tokens": tokens,
            "cut": cut,
        }
        for place, (text, tokens, cut) in kept.in_order()
    ]
    return responses, len(wanted) - kept.earlier


def main(
    recipe: Path,
    blend: Annotated[str, "the generated blend"],
    exports: Annotated[list[Path], "hf/record.json of each model, in the recipe's order"],
    prompts: Annotated[Path, "the training split of the prompts"],
    held_out: Annotated[list[Path], "splits whose prompts may not come in, in folders named by blend"],
    shard: Annotated[str, "which shard, as 1-of-4"],
    store: Annotated[Path, "folder of the responses of all calls"],
    output: Annotated[Path, "Parquet file of the responses"],
    engine: Annotated[Literal["transformers", "vllm"], "what samples"] = "transformers",
    threads: int = 2,
    accelerator: Annotated[Literal["auto", "cuda", "cpu"], "device of the models"] = "cpu",
) -> None:
    """Sample a shard's responses of every model."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    loaded = load_recipe(recipe)
    register(own_environments(loaded))
    source = loaded.blends[blend].generated
    kinds = {path: loaded.blends[path.parent.name].kind for path in held_out}
    asked, left_out = prompts_of(source, prompts, loaded.blends[source.prompts].kind, kinds)
    number, _, shards = shard.partition("-of-")
    packages = {name: _version(name) for name in ENGINES[engine]} | {"gpus": count_gpus(accelerator) > 0}
    rows, began, sampled = [], time.monotonic(), 0
    for place, (name, export) in enumerate(zip(source.models, exports, strict=True)):
        content = read_record(export, ExportRecord)["content"]
        lines = [[prompt.line, prompt.sha256] for prompt in asked]
        identity = sha256_text(canonical_json([content, source.decoding, source.samples, lines, packages]))[:16]
        loaded_engine = engine_of(engine, export, source.decoding, accelerator)
        shared = int(number) - 1, int(shards)
        responses, new = sample(loaded_engine, asked, source.samples, shared, store / identity, f"responses of {name}")
        sampled += new
        rows += [{"model": place, **response} for response in responses]
    write_table(pa.Table.from_pylist(rows, schema=RESPONSES), output)
    pace = {"responses": sampled, "seconds": round(time.monotonic() - began, 1)} if sampled else {}
    write_json(output.with_suffix(".json"), {"prompts": len(asked), "left_out": dict(left_out), **pace})


if __name__ == "__main__":
    run_command_line(main)
