"""Why and when a training should stop before its planned step: a signal, or the end of its allocation."""

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Asked at the end of every step; once it is due, the step is saved and the training ends as unfinished."""

    def __init__(self, deadline: float | None = None) -> None:
        """`deadline`: seconds since the epoch at which the allocation ends; None: never."""
        self.deadline = deadline
        self.reason: str | None = None
        self.signalled = False

    def listen(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP as requests; a second Ctrl-C (SIGINT) acts at once, as it does by default."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def is_due(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether to stop now: a signal came, or one more step and its save may not end before the deadline."""
        if self.reason is None and self.deadline is not None:
            left = self.deadline - time.time()
            if left < step_seconds + save_seconds:
                self.reason = f"{left:.0f} s are left before the deadline"
        return self.reason is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason, self.signalled = signal.Signals(number).name, True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        print(f"{self.reason}: saving at the end of this step", flush=True)
