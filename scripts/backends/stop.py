"""Stop a training before its planned step: at a signal, or before the end of its allocation."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from scripts.errors import UserError
from scripts.files import write_text

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A request to stop, looked for after every step; the step is then saved and the training ends as unfinished.

    Processes of one training share the request by a file on their file system (another host may see it seconds late).
    The file's folder belongs to one attempt; without the folder the attempt is over.
    """

    def __init__(self, deadline: float | None = None, file: Path | None = None) -> None:
        """`deadline`: the allocation's end in seconds since the epoch, or None. `file`: the shared request."""
        self.deadline = deadline
        self.file = file
        self.reason: str | None = None

    @property
    def signalled(self) -> bool:
        """Whether the reason is a signal."""
        return self.reason in {number.name for number in SIGNALS}

    def listen(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP as requests; a second Ctrl-C (SIGINT) interrupts at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def ask(self, reason: str) -> None:
        """Request a stop, here and in all processes that share the file; the first reason stays."""
        self.reason = self.reason or reason
        if self.file is not None and self.file.parent.is_dir() and not self.file.exists():
            write_text(self.file, self.reason)

    def is_due(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether to stop now: on request, or where another step and save may not end before the deadline.

        UserError where the attempt is over: a process that outlived it must not save into the next attempt's folder.
        """
        if self.file is not None and not self.file.parent.is_dir():
            raise UserError(f"{self.file.parent}: is gone, so the attempt is over; nothing was saved")
        self._look()
        if self.reason is None and self.deadline is not None:
            left = self.deadline - time.time()
            if left < step_seconds + save_seconds:
                self.ask(f"{max(left, 0):.0f} s are left before the deadline")
        return self.reason is not None

    @contextmanager
    def shared(self, file: Path) -> Iterator[None]:
        """Share requests through `file` while the block runs; remove an earlier attempt's."""
        file.unlink(missing_ok=True)
        self.file = file
        if self.reason is not None:
            self.ask(self.reason)
        try:
            yield
        finally:
            self._look()
            self.file = None

    def _look(self) -> None:
        if self.reason is None and self.file is not None and self.file.exists():
            self.reason = self.file.read_text(encoding="utf-8")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.reason is None:  # Snakemake may pass on a signal that all processes got
            print(f"{name}: saving at the end of the step", flush=True)
        try:
            self.ask(name)
        except (OSError, UserError) as error:
            print(f"{name} did not reach the training processes: {error}", flush=True)
