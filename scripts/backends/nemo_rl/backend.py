"""Backend `nemo_rl`: NeMo-RL's driver in containers, within a Slurm job."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from jinja2 import TemplateError

from scripts.backends.nemo_rl.checkpoints import lay_in, reach_of, seal_finished
from scripts.backends.nemo_rl.checks import check_traps
from scripts.backends.nemo_rl.checks.context import chat_format_of
from scripts.backends.nemo_rl.command import cluster_environment
from scripts.backends.nemo_rl.demonstrations import MisreadOf, Parts, parts_of, problems_of
from scripts.backends.nemo_rl.export import convert
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.protocol import Allocation, Backend, StopRequest, TrainingJob
from scripts.backends.tokens import load_here, shown_row, without_torch
from scripts.errors import UserError
from scripts.finding import Check, Finding, Moment
from scripts.recipe.site import Site
from scripts.records import ShownRow, read_if_there
from scripts.rows.arrival import Reading
from scripts.rows.chat_format import prints_date, tokenizer_of
from scripts.rows.jsonl import read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.measures import BlockMeasure
from scripts.rows.prompts import render_prompt
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage


class ImageFile(TypedDict, total=False):
    """The record beside an image's file (images.py)."""

    source: str
    digest: str | None
    sha256: str


def check_date(candidate: Candidate) -> Iterator[Finding]:
    """Find a chat template with the date, since nothing pins the date in NeMo-RL's containers."""
    stage = candidate.stage
    chat_format = BACKEND.chat_format(stage)
    if chat_format is None or chat_format.chat_template is None:
        return
    variables = stage.config.tokenizer.get("chat_template_kwargs") or {}
    if prints_date(chat_format.chat_template, chat_format.folder, variables):
        yield candidate.warns(
            "the chat template prints the day's date, and NeMo-RL prints the day on which it trains; give a date by "
            "policy.tokenizer.chat_template_kwargs where the template takes one (date_string), or name a template "
            "without a date"
        )


class NotShown(Exception):
    """Why a row cannot be shown as it is trained on."""


def parts_of_prompt(row: dict[str, Any], place: str, processor: Any, stage: NemoRlSettings) -> Parts:
    """Return the one part of a row of prompts, in the chat template; NotShown where the template refuses the row."""
    variables = stage.tokenizer.get("chat_template_kwargs") or {}
    try:
        text = render_prompt(row, processor, **variables)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise NotShown(f"{place}: Gym may read what the chat template does not: {error!r}") from None
    return [("prompt", False, tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"])]


PARTS_OF = {"demonstrations": parts_of, "prompts": parts_of_prompt}
"""The function that tokenizes a row to be shown, by the kind of rows; NeMo-RL tokenizes other kinds itself."""


class NemoRl(Backend):
    """Start and watch NeMo-RL's driver."""

    chat_format = staticmethod(chat_format_of)
    seal_finished = staticmethod(seal_finished)
    begin_from = staticmethod(lay_in)
    reach_of = staticmethod(reach_of)
    export = staticmethod(convert)

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Start the driver in the Slurm job and watch to the end."""
        if allocation.job is None:
            raise UserError(
                f"{job.stage}: NeMo-RL trains in a Slurm job: snakemake --profile slurm, and a site with a slurm "
                "section"
            )
        from scripts.backends.nemo_rl import train  # noqa: PLC0415 - TensorBoard takes a moment to load

        train.train(job, allocation)

    def checks(self) -> Sequence[Check[Candidate]]:
        """Return the checks of the traps, of the date in a chat template, and of rows of SFT."""
        return [
            Check(Moment.PLAN, check_date, again="the start's export, with its chat template, may be there since"),
            Check(Moment.START, check_traps, again="rows and exports may be there since, and the site's files change"),
            Check(Moment.PREFLIGHT, self.check_reading),
        ]

    def check_reading(self, candidate: Candidate) -> Iterator[Finding]:
        """Find rows that SFT would misread."""
        for split, misread in self.measures(candidate.stage):
            for problem in without_torch(problems_of, split, misread):
                yield candidate.stops(problem)

    def measures(self, stage: Stage) -> list[tuple[Path, BlockMeasure]]:
        """Return the rows that SFT would misread."""
        misread = self.misread_by(stage)
        splits = (stage.train_split, stage.validation_split) if misread is not None else ()
        return [(split, misread) for split in splits]

    def misread_by(self, stage: Stage) -> MisreadOf | None:
        """Return the measure of rows that SFT would misread; None for another algorithm, or without a chat format."""
        chat_format = self.chat_format(stage) if stage.settings.loop.reads_conversations else None
        if chat_format is None:
            return None
        readers = release_of(stage.config.release["name"]).sft_data.values()
        preserves = any(reader.get("use_preserving_dataset") for reader in readers)
        return MisreadOf(chat_format, stage.settings, preserves)

    def reading(self, stage: Stage, chat_template: str, folder: Path) -> Reading | None:
        """Return how NeMo-RL's readers of rows give them to the chat template (read, at v0.7.0 and main; SFT is tried).

        SFT passes messages and tools. The reader of pairs, for DPO and reward models, passes no tools. vLLM's server
        renders prompts for Gym, with items of calls, results and thoughts as messages.
        """
        kind, sft = stage.settings.kind, getattr(stage.config, "sft", None) or {}
        return Reading(
            kind=kind,
            chat_template=chat_template,
            folder=folder,
            learns=KINDS[kind].learns(every_turn=not sft.get("only_unmask_final")),
            variables=dict(stage.config.tokenizer.get("chat_template_kwargs") or {}),
            passes_tools=kind != "preferences",
        )

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return the first rows as SFT reads them, or GRPO's prompts in the chat template; a text for pairs."""
        found, parts_of_row = self.chat_format(stage), PARTS_OF.get(stage.settings.kind)
        if parts_of_row is None:
            return f"NeMo-RL tokenizes the pairs of {stage.settings.algorithm} by itself"
        if found is None:
            return "the tokenizer or the chat template that it trains with is not in a folder here"
        tokenizer, rows = load_here(found.folder, found.chat_template), []
        if isinstance(tokenizer, str):
            return tokenizer
        for number, _, row in islice(read_rows(stage.train_split), count):
            try:
                parts = parts_of_row(row, f"{stage.train_split}:{number}", tokenizer, stage.config)
            except NotShown as why:
                return str(why)
            rows.append(shown_row(number, parts, tokenizer_of(tokenizer)))
        return rows

    def image_of(self, stage: Stage, site: Site | None) -> dict[str, Any] | None:
        """Return the stage's container, with digest and hash from the name or the record beside the file."""
        if site is None or site.nemo_rl is None:
            return None
        name = runtime_of(stage.recipe, stage.name, site).image
        if not name.endswith(".sqsh"):
            return {"name": name, "digest": name.partition("@")[2] or None, "sha256": None}
        made_from = read_if_there(Path(f"{name}.json"), ImageFile) or {}
        hashes = {kind: made_from.get(kind) for kind in ("digest", "sha256")}
        return {"name": made_from.get("source") or Path(name).name, **hashes}

    def command_text(self, stage: Stage, site: Site) -> str:
        """Return ray.sub's variables and the driver's command."""
        if site.nemo_rl is None:
            return super().command_text(stage, site)
        from scripts.backends.nemo_rl.train import launch_of  # noqa: PLC0415 - as above

        job = TrainingJob.of(stage, max_num_steps=stage.planned or 0, threads=site.threads, stop=StopRequest())
        launch = launch_of(job, site)
        if stage.planned is None:
            launch = replace(launch, max_num_steps=f"unknown until the rows of {stage.settings.blend} are there")
        cpus = site.slurm.cpus_per_node or "those of the job on a node"
        variables = cluster_environment(launch, stage.paths.logs.absolute(), cpus)
        command = variables.pop("COMMAND")
        return "\n".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), "", command])


BACKEND = NemoRl()
