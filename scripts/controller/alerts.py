"""Tell a person that a stage is published, stalls, fails or is stopped by its gate, and that Snakemake ends or dies.

This program runs beside Snakemake: no receiver delays or fails a job, and somebody is left to tell of a death. In
``<run>/alerts.jsonl`` lie the alerts: none is told twice, and one that no receiver took comes again with the next.
"""

import atexit
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from scripts.controller.retries import logger
from scripts.credentials import without_credentials
from scripts.errors import UserError
from scripts.files import append_json, read_tail
from scripts.program import run_command_line
from scripts.recipe.config import Alerts
from scripts.records import CheckpointRecord, Criteria, read_lines, read_record
from scripts.slurm.jobs import STAGE_RULES
from scripts.stage.provenance import step_text
from scripts.stage.training_folder import TrainingFolder

LIMIT = 10.0  # seconds in which a receiver takes an alert
DEATH = "Snakemake died; jobs on a cluster go on, and the next call finds them"


class Messenger:
    """Hands over the alerts of one call on a results folder."""

    def __init__(self, alerts: Alerts | None, workflow: Any, results: Path, call: int) -> None:
        self.alerts, self.workflow, self.results, self.call, self.sender = alerts, workflow, results, call, None

    def start(self) -> None:
        """Start the process that delivers; UserError for an address that no file may hold."""
        if self.alerts:
            refuse_secrets(self.alerts)
            options = ["--alerts", self.alerts.model_dump_json(), "--results", self.results, "--call", str(self.call)]
            command = [sys.executable, "-m", "scripts.controller.alerts", *options]
            self.sender = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)  # noqa: S603
            atexit.register(self._end)
            with suppress(Exception), (self.results / "alerts.jsonl").open("a") as record:  # published meanwhile
                since, files = os.fstat(record.fileno()).st_mtime, self.results.glob("*/ckpt/record.json")
                for stage in [file.parts[-3] for file in files if file.stat().st_mtime > since]:
                    self._tell(self._published(stage), stage)

    def after_success(self, job: Any) -> None:
        """Tell of a job that is done. No error leaves."""
        self._tell_of(job, is_done=True)

    def after_failure(self, job: Any, interruption: str | None) -> None:
        """Tell of a failed job; `interruption` says why it goes on later. No error leaves."""
        self._tell_of(job, is_done=False, interruption=interruption)

    def _tell_of(self, job: Any, is_done: bool, interruption: str | None = None) -> None:
        if self.sender is None:
            return
        try:
            text = without_credentials(self._text_on(job, is_done, interruption) or "")
            if text:
                self._tell(text, job.wildcards.get("stage", ""))
        except Exception as error:
            logger.warning(f"alerts: {error}")

    def _text_on(self, job: Any, is_done: bool, interruption: str | None) -> str | None:
        name, stage, who = job.rule.name, job.wildcards.get("stage"), " ".join([job.rule.name, *job.wildcards])
        if is_done and name in STAGE_RULES:
            return self._published(stage)
        if is_done and name == "gate":
            judged = read_record(self.results / stage / "criteria.json", Criteria)
            stops = [row["says"] for row in judged["criteria"] if row["outcome"] == "stop"]
            return f"{stage}: its gate says stop: {'; '.join(stops)}" if stops else None
        if not is_done and not interruption and job.attempt > job.restart_times:
            said = without_credentials(" ".join(line for log in job.log for line in read_tail(Path(log), 2000)))
            return f"{who}: failed, waits for a person: {said.rpartition('error: ')[2]} ({job.log})"
        if not interruption or name not in STAGE_RULES:
            return None
        last = self._training(stage).attempts_of(self.call)[-1:]
        return interruption if any(attempt["outcome"] == "stalled" for attempt in last) else None

    def _training(self, stage: str) -> TrainingFolder:
        """Return the folder of the stage's last training, as it is now."""
        return TrainingFolder(self.results / stage / "run")

    def _published(self, stage: str) -> str:
        record = read_record(self.results / stage / "ckpt/record.json", CheckpointRecord)
        return f"{stage}: trained and published, step {step_text(record)}"

    def _tell(self, text: str, stage: str | None = None) -> None:
        event = str(self.call) if stage is None else f"{self._training(stage).identity} {text}"
        self.sender.stdin.write(json.dumps({"event": event, "text": text}).encode() + b"\n")

    def _end(self) -> None:
        with suppress(Exception, KeyboardInterrupt):
            done = f"{self.workflow.scheduler.finished_jobs} of {len(self.workflow.dag)} jobs done"
            self._tell(f"Snakemake ends, {done}")
            self.sender.communicate(timeout=LIMIT)


def refuse_secrets(alerts: Alerts | None) -> None:
    """UserError for addresses that no file may hold, as far as Apprise is installed here; None: no alerts are set."""
    if alerts is None or find_spec("apprise") is None:
        return
    for url in alerts.urls:
        refuse_secret(url)


def refuse_secret(url: str) -> None:
    """UserError for an address that Apprise cannot read, or that holds a secret by Apprise's own judgement."""
    from apprise import Apprise  # noqa: PLC0415  (optional)

    known, at = Apprise.instantiate(url), f"config/config.yaml: alerts.urls: {url.partition(':')[0]}:..."
    if not known or known.url() != known.url(privacy=True) or re.search(r"[?&](\+|%2b)", url, re.IGNORECASE):
        raise UserError(f"{at}: unknown to Apprise, or with a token or password; name its variable in alerts.urls_from")


def main(
    alerts: Annotated[Alerts, "as in config/config.yaml, in JSON", Alerts.model_validate_json],
    results: Annotated[Path, "the run's folder"],
    call: Annotated[str, "number of the workflow's call"],
) -> None:
    """Deliver alerts until the input ends."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the end of the input ends this process
    logging.disable()  # Apprise's words may hold an address
    record, title = results / "alerts.jsonl", f"Stagecoach on {socket.gethostname()}: {results}"
    receivers = [(url.partition(":")[0], url) for url in alerts.urls]
    receivers += [(f"the URL in {name}", os.environ.get(name, "")) for name in alerts.urls_from]
    receivers += [(alerts.command[0], alerts.command)] if alerts.command else []
    for new in chain(map(json.loads, sys.stdin), [{"event": call, "text": DEATH}]):
        known = {alert["event"]: alert for alert in read_lines(record, dict[str, Any])}
        if new["event"] not in known:
            owed = [*(alert for alert in known.values() if not alert["told"]), new][-20:]
            pool, text = ThreadPoolExecutor(), "\n".join(alert["text"] for alert in owed)
            sent = {pool.submit(takes, receiver, title, text): name for name, receiver in receivers}
            took = {each for each in wait(sent, LIMIT).done if not each.exception() and each.result()}
            for alert in owed:
                append_json(record, alert | {"time": time.time(), "told": bool(took)})
            failing = {sent[each] for each in sent.keys() - took}
            with suppress(OSError):  # the terminal may be gone
                sys.stderr.write("".join(f"alerts: {name} took no alert within {LIMIT:g} s\n" for name in failing))
    os._exit(0)  # beside a receiver that hangs


def takes(receiver: str | list[str], title: str, text: str) -> bool:
    """Send a text to an Apprise URL or a command's input, and return whether it was taken."""
    if isinstance(receiver, list):
        silent, message = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}, f"{title}\n{text}\n".encode()
        return not subprocess.run(receiver, input=message, timeout=0.9 * LIMIT, check=False, **silent).returncode  # noqa: S603
    from apprise import Apprise  # noqa: PLC0415  (optional)

    return bool((apprise := Apprise()).add(receiver) and apprise.notify(text, title))


if __name__ == "__main__":
    run_command_line(main)
