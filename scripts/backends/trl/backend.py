"""Backend `trl`: TRL's trainers, in this process or on the nodes of a Slurm job."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from scripts.backends.protocol import Allocation, Backend, TrainingJob
from scripts.backends.tokens import load_here, shown_row
from scripts.backends.trl.checks import CHECKS, HoldingOf, rowless_tokens
from scripts.backends.trl.cluster import in_processes, on_cluster, train_apart
from scripts.backends.trl.placing import (
    check_shares,
    counts_rows,
    devices_of,
    longest_row_of,
    model_at_hand,
    sentence,
)
from scripts.backends.trl.this_process import train_here
from scripts.backends.trl.tokenization import lines_of, parts_of, preparation_of
from scripts.errors import UserError
from scripts.files import check_readable, describe_files, read_json, sha256_file, temporary_directory
from scripts.finding import Check
from scripts.processes import share_cores
from scripts.recipe.resolve import own_environments
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import StageSettings
from scripts.records import CheckpointRecord, Reach, ShownRow, read_record
from scripts.rewards.registry import (
    register,
    tool_schemas,
)
from scripts.rewards.row_facts import FactsOf
from scripts.rows.arrival import Reading
from scripts.rows.chat_format import pin_date, tokenizer_of
from scripts.rows.kinds import KINDS
from scripts.rows.measures import BlockMeasure
from scripts.stage import publish
from scripts.stage.candidate import Candidate
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.stopping import ending_in
from scripts.stage.training_folder import TrainingFolder


class Trl(Backend):
    """Trains with TRL's trainers."""

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return the tokens of the first training rows as the trainer gets them, or the reason why there are none.

        UserError where the trainer would refuse the rows or the stage's chat template.
        """
        config, folder = stage.config, stage.parent_export
        register(own_environments(stage.recipe, stage.name), config.environments)
        pin_date(config.template_date)
        processor = load_here(folder or config.model, config.chat_template)
        if isinstance(processor, str):
            return processor
        tokenizer, ends = tokenizer_of(processor), _ends(folder)
        if config.chat_template is not None:
            from scripts.model.processor import check_template  # noqa: PLC0415

            key = f"{stage.name}: policy.tokenizer.chat_template"
            advice = "name another one, or the right token as model.eos_token"
            variables = config.policy.tokenizer.chat_template_kwargs
            check_template(key, tokenizer, key, ends, advice, variables)
        _, prepare = preparation_of(config, processor)
        found = ((line.number, row) for line in lines_of(stage.train_split) for row in prepare([line]))
        rows = [shown_row(line, parts_of(row, processor), tokenizer) for line, row in islice(found, count)]
        learnt = {token for row in rows for part in row["parts"] if part["is_learnt"] for token in part["ids"]}
        if learnt and not learnt & {tokenizer.eos_token_id, *ends}:
            rows[0]["remark"] = f"no shown row learns {tokenizer.eos_token!r}, so the model may not learn to end"
        return rows

    def reading(self, stage: Stage, chat_template: str, folder: Path) -> Reading | None:
        """Return how TRL's trainers get the stage's rows."""
        config = stage.config
        sft = getattr(config, "sft", None)
        register(own_environments(stage.recipe, stage.name), config.environments)
        # rows are taken from the beginning of the file, unless they are shuffled
        is_shuffled = getattr(getattr(config, "data", None), "shuffle", False)
        return Reading(
            kind=config.kind,
            chat_template=chat_template,
            folder=folder,
            learns=KINDS[config.kind].learns(every_turn=sft is not None and sft.assistant_only_loss),
            variables=dict(config.policy.tokenizer.chat_template_kwargs),
            tools_of=tool_schemas(config.environments),
            obeys_template=True,
            names_reasoning=True,
            rows=None if is_shuffled else stage.planned * config.rows_per_step,
        )

    def measures(self, stage: Stage) -> list[tuple[Path, BlockMeasure]]:
        """Return the longest row, rows without a reward, and rows with tokens that the embedding lacks."""
        blend = stage.recipe.blends[stage.settings.blend]
        found: list[tuple[Path, BlockMeasure]] = []
        model, shape = model_at_hand(stage)
        if model is not None and shape is not None and counts_rows(stage, model):
            found.append((stage.train_split, longest_row_of(stage, model / "tokenizer.json")))
        numbers, _ = rowless_tokens(stage)
        for split in (stage.train_split, stage.validation_split):
            if blend.kind == "prompts":
                found.append((split, FactsOf(blend.kind, frozenset(blend.allow))))
            if numbers:
                found.append((split, HoldingOf(tuple(numbers))))
        return found

    def memory(self, stage: Stage, site: Site) -> tuple[str, bool | None]:
        """Return a sentence on a process's memory, and whether the stage fits."""
        return sentence(stage, site)

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Train in this process, in several processes of the node, or on several nodes."""
        if allocation.site is not None:
            site, (accelerator, processes) = allocation.site, devices_of(allocation.site)
            told = {"gym_python": site.gym_python, "report_to": tuple(site.report_to)}
            job = replace(job, accelerator=accelerator, processes=processes, **told)
        check_shares(job.stage, job.config, job.settings, job.nodes, job.ranks)
        print(f"{job.stage}: {job.threads} threads wait for one another by {share_cores()}", flush=True)
        if job.ranks == 1:
            train_here(job)
        else:
            train_apart(job, partial(in_processes, job) if job.nodes == 1 else partial(on_cluster, job, allocation))

    def reach_of(
        self, config: StageSettings, training: TrainingFolder, newest: Checkpoint | None, planned: int, rows: int
    ) -> Reach:
        """How far an attempt gets: to the planned step, or to where `stop_when` ended the training."""
        ending = ending_in(training, config.stopping, planned, newest.step if newest else 0)
        return Reach(ending.last, ending.last < planned) if ending else Reach(planned)

    def checks(self) -> Sequence[Check[Candidate]]:
        """Return the checks of this backend."""
        return CHECKS

    def export(self, stage: Stage, site: Site | None, log: Path | None) -> None:
        """Export the published checkpoint, adapters merged."""
        if stage.config.policy.lora is None:
            self.export_as_it_is(stage)
        else:
            _export_merged(stage)


def _export_merged(stage: Stage) -> None:
    """Export the start with the adapters merged; UserError where their file differs from the checkpoint's record."""
    from transformers import logging as transformers_logging  # noqa: PLC0415 - only where adapters were trained

    from scripts.model.merge import WEIGHTS, NotMerged, write_merged  # noqa: PLC0415

    paths, exports = stage.paths, TrainingFolder.behind(stage.paths.weights).exports
    record, adapters = read_record(paths.record, CheckpointRecord), paths.weights / WEIGHTS
    listed = record["files"].get(WEIGHTS)
    if not adapters.is_file() or listed is None or sha256_file(adapters) != listed["sha256"]:
        raise UserError(publish.damaged(adapters, paths.record))
    check_readable(stage.parent_export)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with temporary_directory(exports / "incoming") as fresh:
        try:
            found = write_merged(stage.parent_export, paths.weights, fresh)
        except NotMerged as error:
            raise UserError(str(error)) from None
        publish.take_settings(stage.parent_export, fresh, stage.config.chat_template)
        files = describe_files(fresh)
        publish.settle_export(fresh, exports, files, f"{stage.name}: step {record['step']}")
    publish.publish_export(record, files, paths.export_record.parent, exports, merged=found)


def _ends(folder: Path | None) -> list[int]:
    """Return the tokens that end a generation, by a model's settings."""
    settings = folder and folder / "generation_config.json"
    ends = read_json(settings).get("eos_token_id") if settings and settings.exists() else None
    return ends if isinstance(ends, list) else [ends] if ends is not None else []


BACKEND = Trl()
