"""Three corrections of Snakemake's Slurm plugin (2.8.0) in this process.

Its questions to Slurm go through the stand-ins in profiles/slurm/bin, which come first in PATH: they work without an
accounting database and while Slurm's controller is away. And ``--seconds-between-status-checks``, which the plugin
leaves aside, bounds the time between two questions; by itself it waits 10 s longer after every one that found nothing
finished, up to 180 s. And of a job that failed it shows the program's log alone, not Slurm's as well, in which the same
is said between what two more Snakemakes print.
"""

import os
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_slurm import Executor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor


def use_stand_ins(repository: Path, results: str) -> None:
    """Put the stand-ins first in PATH, here and in every job."""
    folder = str(repository / "profiles/slurm/bin")
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in path:
        path.insert(0, folder)
    os.environ.update(
        PATH=os.pathsep.join(path),
        STAGECOACH_STAND_INS=folder,
        STAGECOACH_RESULTS=results,
        STAGECOACH_SNAKEMAKE=str(os.getpid()),
    )


def bound_polling() -> None:
    """Make the plugin heed the flag; calling it again changes nothing."""
    plain = RemoteExecutor.next_seconds_between_status_checks

    def bounded(self: Executor) -> float:
        return min(plain.fget(self), self.workflow.remote_execution_settings.seconds_between_status_checks)

    Executor.next_seconds_between_status_checks = property(bounded, plain.fset)


def show_own_logs() -> None:
    """Show Slurm's log of a failed job only where the program has left none; calling it again changes nothing."""

    def shown(self: Executor, job_info: SubmittedJobInfo, msg: str | None = None, **options: Any) -> None:
        if any(Path(log).is_file() and Path(log).stat().st_size for log in job_info.job.log):
            options.pop("aux_logs", None)
        super(Executor, self).report_job_error(job_info, msg, **options)

    Executor.report_job_error = shown
