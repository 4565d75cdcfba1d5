"""The job of a stage made small for a try: a few rows, a step or two, short responses, everything else as it is."""

import heapq
import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithm import TrlSettings
from scripts.backends.trl.on_policy import VllmEngine
from scripts.backends.trl.sampler import CORRECTION
from scripts.files import sha256_file, write_json
from scripts.recipe.resolve import training_config
from scripts.recipe.stage_settings import Checkpointing

STEPS = 2
"""The first from the start, the second from the first one's checkpoint."""
BATCH = 2
NEW_TOKENS = 8
CANDIDATES = 200
BYTES_OF_A_TOKEN = 3
"""Fewer than most tokenizers read at once, so that a row of so many bytes is rarely cut."""
LEAST_TOKENS = 64


@dataclass
class SmallJob:
    """A small job, the lines of its rows in the stage's own split, and what the try leaves out, a phrase each."""

    job: TrainingJob
    lines: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def small_job(job: TrainingJob, folder: Path, most_tokens: int, on_cpu: bool) -> SmallJob:
    """Return a job like the stage's for a try in `folder`, on this machine's CPUs, of rows of at most `most_tokens`.

    `on_cpu`: the stage itself trains on CPUs, so that it can do nothing that needs a GPU.
    """
    small = SmallJob(job)
    config = _small_config(job, max(LEAST_TOKENS, most_tokens), small.remarks)
    split, small.lines = _write_splits(job, config, folder / "data")
    settings = _small_settings(job.settings)
    if not on_cpu and config.policy.attn_implementation is None and job.config.policy.attn_implementation:
        small.remarks.append(f"attn_implementation {job.config.policy.attn_implementation} needs a GPU")
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    small.job = replace(
        job,
        config=config,
        settings=settings,
        train_split=split,
        run=run,
        directory=folder,
        resume_from=None,
        begun=0,
        max_num_steps=1,
        nodes=1,
        processes=1,
        accelerator="cpu",
        report_to=(),
    )
    return small


def _small_settings(settings: TrlSettings) -> TrlSettings:
    """Return a stage's settings that save every step, end at no gate, and cut whatever is too long."""
    policy = settings.policy
    micro = policy.train_micro_batch_size
    # As few rows at once as the loss allows where the stage accumulates, so that the try accumulates too.
    if micro is not None and micro < settings.rows_per_update:
        policy = policy.model_copy(update={"train_micro_batch_size": settings.least_rows})
    else:
        policy = policy.model_copy(update={"train_micro_batch_size": None})
    changes = {
        "policy": policy,
        "checkpointing": Checkpointing(save_period=1),
        "gate": [],
        "default_gate": False,
        "max_truncated_share": 1.0,
    }
    return settings.model_copy(update=changes)


def _small_config(job: TrainingJob, most_tokens: int, remarks: list[str]) -> TrlSettings:
    """Return the stage's config with small numbers of rows, steps and tokens."""
    config = job.config
    values = deepcopy(config.values())
    policy, section = values["policy"], values[config.algorithm]
    section["max_num_steps"] = STEPS
    values.pop("stop_when", None)  # ends a training by more steps than these
    if (policy.get("attn_implementation") or "").startswith("flash"):
        del policy["attn_implementation"]
    if config.kind != "prompts":
        policy["max_total_sequence_length"] = min(config.max_length, most_tokens)
        policy["train_global_batch_size"] = min(config.rows_per_step, BATCH * config.least_rows)
        if config.kind in ("preferences", "unpaired"):
            policy["truncation_mode"] = "keep_start"
        return training_config(values)
    generation = policy["generation"]
    generation["max_new_tokens"] = min(generation["max_new_tokens"], NEW_TOKENS)
    policy["max_total_sequence_length"] = min(config.longest_prompt, most_tokens) + generation["max_new_tokens"]
    data = values.setdefault("data", {})
    data["max_input_seq_length"] = policy["max_total_sequence_length"] - generation["max_new_tokens"]
    config.make_small(values, prompts=BATCH, starts=len({*job.roles.values()}))
    if config.samples_by_vllm:
        remarks.append("the rollouts were sampled by transformers, not by vLLM")
        generation.pop("backend")
        generation["vllm_cfg"] = VllmEngine().model_dump(mode="json")
        for name in CORRECTION:
            values.get("loss_fn", {}).pop(name, None)
    return training_config(values)


def _write_splits(job: TrainingJob, config: TrlSettings, data: Path) -> tuple[Path, list[int]]:
    """Write the rows of the try and their manifest; return the training split, and the rows' lines in the stage's."""
    data.mkdir(parents=True)
    split = data / "train-split.jsonl"
    count = STEPS * config.rows_per_step
    rows = longest_rows(job.train_split, count, config.longest_row * BYTES_OF_A_TOKEN, config.kind == "prompts")
    split.write_bytes(b"".join(line for _, line in rows))
    held_out, source = data / "val-split.jsonl", job.train_split.with_name("val-split.jsonl")
    if source.is_file() and source.stat().st_size:
        with source.open("rb") as lines:
            held_out.write_bytes(b"".join(islice(lines, BATCH)))
    else:
        held_out.write_bytes(split.read_bytes())
    described = {
        name: {"rows": path.read_bytes().count(b"\n"), "sha256": sha256_file(path)}
        for name, path in (("train", split), ("validation", held_out))
    }
    write_json(data / "manifest.json", described)
    return split, sorted(number for number, _ in rows)


def longest_rows(split: Path, count: int, most_bytes: int, by_environment: bool) -> list[tuple[int, bytes]]:
    """Return the number and text of the longest lines that fit, and of the shortest where fewer fit.

    `by_environment`: each environment's longest come first, as far as they are among the longest.
    """
    fitting: list[tuple[int, int, bytes]] = []
    longer: list[tuple[int, int, bytes]] = []
    with split.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            fits = len(line) <= most_bytes
            kept, size = (fitting, len(line)) if fits else (longer, -len(line))
            entry = (size, -number, line if line.endswith(b"\n") else line + b"\n")
            if len(kept) < max(count, CANDIDATES):
                heapq.heappush(kept, entry)
            elif entry > kept[0]:
                heapq.heapreplace(kept, entry)
    ordered = [*sorted(fitting, reverse=True), *sorted(longer, reverse=True)]
    chosen = [(-negative, line) for _, negative, line in ordered]
    return (_one_of_each(chosen) if by_environment else chosen)[:count]


def _one_of_each(rows: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return rows with the first of each environment before all others."""
    first: dict[str, int] = {}
    for place, (_, line) in enumerate(rows):
        first.setdefault(json.loads(line)["agent_ref"]["name"], place)
    places = [*first.values()]
    return [rows[place] for place in [*places, *(place for place in range(len(rows)) if place not in places)]]
