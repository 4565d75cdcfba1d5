"""A filter on Snakemake's logger: it words records anew and decides nothing, as scripts.controller.scheduling does.

A mistake becomes one line with the nearest target and no frame of Python, a dry run a line a job with the plan at its
end.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from textwrap import indent
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake import exceptions
from snakemake.io import strip_wildcard_constraints
from snakemake_interface_logger_plugins.common import LogEvent

from scripts.controller.controller_lock import holders
from scripts.errors import UserError, explain_refusal, write_any_text
from scripts.recipe.config import Config
from scripts.recipe.load import check_stage_name
from scripts.recipe.recipe import Recipe
from scripts.recipe.yaml_file import read_yaml

SNAKEMAKE = "snakemake.logging"
CONFIG = Path("config/config.yaml")
NO_RULE = re.compile(r"No rule to produce (.+?) \(if you use")
RESOURCES = (
    *("nodes", "runtime", "tasks", "gres", "cpus_per_task", "mem_mb", "slurm_partition", "slurm_account", "qos"),
    *("constraint", "slurm_extra", "sbatch_arguments", "second_component"),
)
FILES_SHOWN = 3
REPEATED = ("Reasons:\n", "Some jobs were triggered by provenance", "Rules with provenance triggered jobs")


class Console(logging.Filter):
    """The filter of one call. `plan` and `at_end` return texts, and are set once the workflow is read.

    Messages on targets need `config` and `recipe`.
    """

    def __init__(self, workflow: Any) -> None:
        super().__init__()
        self.workflow = workflow
        self.config: Config | None = None
        self.recipe: Recipe | None = None
        self.plan: Callable[[], str | None] = lambda: None
        self.at_end: Callable[[], str | None] = lambda: None

    def install(self) -> None:
        """Filter the records of Snakemake's logger from now on, in place of an earlier call's filter."""
        write_any_text()
        if self.workflow.output_settings.dryrun:  # and ends, like `ls`, where nobody reads on
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        snakemake = logging.getLogger(SNAKEMAKE)
        for earlier in [known for known in snakemake.filters if isinstance(known, Console)]:
            snakemake.removeFilter(earlier)
        snakemake.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a record; False drops it."""
        event = getattr(record, "event", None)
        if event == LogEvent.ERROR:
            if (error := sys.exc_info()[1]) is not None and (line := self.line(error)):
                record.msg = f"error: {line}"
            return "CalledProcessError in file" not in record.msg  # the job's own error says the rest
        if event == LogEvent.JOB_INFO and self._is_short:
            record.event, record.msg = None, job_line(record.__dict__)
        elif event == LogEvent.PROGRESS and record.done == record.total and (line := self.at_end()):
            logging.getLogger(SNAKEMAKE).info(line)  # print would fail where the terminal is gone
        elif event is None and str(record.msg).startswith("No job memory information"):
            return False  # --mem=0 is said, or nothing on purpose
        elif event is None and self._is_short and isinstance(record.msg, str):
            if record.msg.startswith(REPEATED):
                return False
            if record.msg.startswith("This was a dry-run"):
                record.msg = f"{self.plan()}\n\n{record.msg}"
        return True

    @property
    def _is_short(self) -> bool:
        shown = self.workflow.output_settings
        return shown.dryrun and not shown.printshellcmds and not shown.verbose

    def line(self, error: BaseException) -> str | None:
        """Return the message on an exception; None leaves Snakemake's text."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                return str(cause)
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, OSError) and error.filename is not None:
            return explain_refusal(error)
        if isinstance(error, exceptions.LockException):
            holder = ", ".join(holders(Path(".snakemake"))) or "a Snakemake that left no note of itself"
            return f"{Path.cwd()} is locked by {holder}; wait for it or stop it; if it is dead: snakemake --unlock"
        if self.config is None and (fault := self._of_config()):
            return fault
        if "At least one job did not complete" in str(error):
            return "not all jobs are done; what each said stands above. Called again, Snakemake goes on from there"
        return self._of_target(error) if self.recipe else None

    def _of_config(self) -> str | None:
        """Return the fault of the config, for which Snakemake names no line; None for a file with keys."""
        if not (path := Path.cwd() / CONFIG).is_file():
            return f"{path}: no such file; call it in your clone, or in a project: stagecoach init FOLDER"
        try:
            if isinstance(data := read_yaml(CONFIG).data, dict) and data:
                return None
        except UserError as error:
            return str(error)
        return f"{CONFIG}: holds no keys; it needs recipe and site at least, as in the one that came with the clone"

    def _of_target(self, error: BaseException) -> str | None:
        if missing := NO_RULE.search(str(error)):
            try:
                return self.missing_target(missing[1])
            except UserError as known:
                return str(known)
        if "Target rules may not contain wildcards" not in str(error):
            return None
        rules = {rule.name: rule for rule in self.workflow.rules}
        name = next(target for target in self.workflow.dag_settings.targets if target in rules)
        return f"{name} is a rule for many files; name one of them, such as {next(self._files(rules[name]), '')}"

    def missing_target(self, target: str) -> str:
        """Explain why no rule makes a target, and suggest the nearest target."""
        named = os.path.relpath(target), self.config.folder, self.config.results
        parts, own, root = (Path(path).parts for path in named)
        files = {file for rule in self.workflow.rules for file in self._files(rule)}
        for begin, ending in product(range(len(parts)), [(), ("ckpt",)]):
            if (meant := "/".join([*own, *parts[begin:], *ending])) in files:
                return f"{target}: results of this call go to {self.config.folder}/; did you mean {meant}?"
        rest = parts[len(own) :] if parts[: len(own)] == own else parts[len(root) * (parts[: len(root)] == root) :]
        near = {file for file in files if file.startswith(f"{self.config.folder}/{rest[0]}/")} if rest else set()
        if len(rest) > 1 and (not near or rest[0] in self.recipe.sweeps):
            check_stage_name(self.recipe, rest[0], f"{target}: ")
        close = get_close_matches(target, near or files | {rule.name for rule in self.workflow.rules}, n=1, cutoff=0.5)
        some = f"targets are files, such as {self.config.folder}/{[*self.recipe.stages][-1]}/ckpt"
        return f"{target}: no rule makes it; {f'did you mean {close[0]}?' if close else some}"

    def _files(self, rule: Any) -> Iterator[str]:
        values = {"stage": [start.name for start in self.recipe.graph.jobs], "blend": [*self.recipe.blends]}
        for output in rule.output:
            pattern, names = strip_wildcard_constraints(str(output)), sorted(output.get_wildcard_names())
            if set(names) <= values.keys():
                for chosen in product(*(values[name] for name in names)):
                    file = pattern.format(**dict(zip(names, chosen, strict=True)))
                    if output.match(file):
                        yield file


def job_line(job: Mapping[str, Any]) -> str:
    """Describe a planned job in a line, rule, wildcards and reason, and its Slurm resources in a second line."""
    wildcards = ", ".join(f"{name}={value}" for name, value in job["wildcards"].items())
    asked = {name: job["resources"].get(name) for name in RESOURCES}
    resources = ", ".join(f"{name}={value}" for name, value in asked.items() if value not in (None, "", 0, -1))
    kind = "checkpoint" if job["is_checkpoint"] else "rule"
    line = f"{kind} {job['rule_name']}: {'; '.join(filter(None, [wildcards, shortened(job['reason'])]))}"
    return indent(f"{line}\n    resources: {resources}" if resources else line, "    " * job["indent"])


def shortened(reason: str) -> str:
    """Shorten Snakemake's reason for a job to three files a kind; drop inputs made anew beside another reason."""
    parts = [part.partition(": ") for part in reason.split("; ")]
    own = [part for part in parts if part[0] != "Input files updated by another job"] or parts
    return "; ".join(
        "not there yet" if what == "Missing output files" else what + _some(files) for what, _, files in own
    )


def _some(files: str) -> str:
    names = files.split(", ")
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return f": {', '.join(names[:FILES_SHOWN])}{more}" if files else ""
