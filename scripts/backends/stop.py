"""Why and when a training should stop before its planned step: a signal, or the end of its allocation."""

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
    """Whether to stop, asked at the end of every step; then the step is saved and the training ends as unfinished.

    Where several processes share one training, the request travels in a file on their shared file system (which
    may show it to another host some seconds late). The file and its directory belong to one attempt; when they are
    gone, the attempt is over.
    """

    def __init__(self, deadline: float | None = None, file: Path | None = None) -> None:
        """`deadline`: seconds since the epoch at which the allocation ends; None: never. `file`: where requests lie."""
        self.deadline = deadline
        self.file = file
        self.reason: str | None = None

    @property
    def signalled(self) -> bool:
        """Whether a signal, not the deadline, is why to stop."""
        return self.reason in {number.name for number in SIGNALS}

    def listen(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP as requests; a second Ctrl-C (SIGINT) acts at once, as it does by default."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def ask(self, reason: str) -> None:
        """Request a stop, here and in every process that shares the file; the first reason stays."""
        self.reason = self.reason or reason
        if self.file is not None and self.file.parent.is_dir() and not self.file.exists():
            write_text(self.file, self.reason)

    def is_due(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether to stop now: it was requested, or one more step and its save may not end before the deadline.

        UserError when the attempt is over: a process that outlived it must not save into the next one's run directory.
        """
        if self.file is not None and not self.file.parent.is_dir():
            raise UserError(f"{self.file.parent}: is gone, so the attempt that trains here is over; nothing was saved")
        self._look()
        if self.reason is None and self.deadline is not None:
            left = self.deadline - time.time()
            if left < step_seconds + save_seconds:
                self.ask(f"{max(left, 0):.0f} s are left before the deadline")
        return self.reason is not None

    @contextmanager
    def shared(self, file: Path) -> Iterator[None]:
        """Share requests through `file` while the block runs; one that an earlier attempt left there is removed."""
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
        print(f"{name}: saving at the end of this step", flush=True)
        try:
            self.ask(name)
        except (OSError, UserError) as error:
            print(f"{name} did not reach the processes that train: {error}", flush=True)
