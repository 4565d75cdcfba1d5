"""What Snakemake shows of jobs: in a dry run a line each and the plan at its end; of resources what Slurm is asked.

Snakemake 9.27 lists for each job all its files, all its resources, those by which rules pass settings to programs among
them, and as the reason the names of the very outputs again.
"""

from collections.abc import Callable, Iterable, Mapping
from textwrap import indent
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake import logging
from snakemake.dag import DAG
from snakemake.jobs import Reason
from snakemake.workflow import Workflow

RESOURCES = (
    *("nodes", "runtime", "tasks", "gres", "cpus_per_task", "mem_mb", "slurm_partition", "slurm_account", "qos"),
    *("constraint", "slurm_extra", "allocations"),
)
FILES_SHOWN = 3


def resources_text(resources: Mapping[str, Any]) -> str:
    """Those of a job's resources that Slurm is asked for, with values."""
    values = {name: resources.get(name) for name in RESOURCES}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, "", 0, -1))


def reason_text(reason: Reason) -> str:
    """Why a job runs; of the inputs that other jobs make anew only where nothing else is a reason."""
    words = {
        "Forced execution": reason.forced,
        "not there yet": reason.missing_output,
        f"cut off while it made {_files(reason.incomplete_output)}": reason.incomplete_output,
        f"changed: {_files(own := reason.updated_input - reason.updated_input_run)}": own,
        "other input files than before": reason.input_changed,
        f"other settings than before: {reason.params_changed}": reason.params_changed,
        "the rule's code has changed": reason.code_changed,
        "its environment has changed": reason.software_stack_changed,
    }
    said = [text for text, is_so in words.items() if is_so]
    if not said and reason.updated_input_run:
        said = [f"made anew by other jobs: {_files(reason.updated_input_run)}"]
    return "; ".join(said) or "runs whenever it is asked for"


def _files(files: Iterable[str]) -> str:
    names = sorted(map(str, files))
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return ", ".join(names[:FILES_SHOWN]) + more


def _nothing(dag: DAG) -> None:
    """The reasons are said beside each job."""


def shorten_display(workflow: Workflow, plan: Callable[[], str]) -> None:
    """Have Snakemake show that in this process; `plan` gives the plan's text."""
    whole = logging.DefaultFormatter.format_job_info

    def format_job_info(self: logging.DefaultFormatter, job: dict[str, Any]) -> str:
        shown = workflow.output_settings
        if not workflow.dryrun or shown.printshellcmds or shown.verbose:
            return whole(self, job)
        facts = [logging.format_wildcards(job["wildcards"]), job["reason"]]
        asked = resources_text(job["resources"])
        kind = "checkpoint" if job["is_checkpoint"] else "rule"
        line = f"{kind} {job['rule_name']}: {'; '.join(filter(None, facts))}"
        return indent(f"{line}\n    resources: {asked}" if asked else line, "    " * job["indent"])

    def print_plan(self: Workflow) -> None:
        self.log_missing_metadata_info()
        logging.logger.info(f"\n{plan()}\n")

    logging.DefaultFormatter.format_job_info = format_job_info
    logging.format_resources = resources_text
    Reason.__str__ = reason_text
    DAG.print_reasons = _nothing
    Workflow.log_provenance_info = print_plan  # a dry run calls it last
