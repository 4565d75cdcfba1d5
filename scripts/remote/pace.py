"""The pace of a transfer."""

import math
import time
from typing import Any

import fsspec


class Pace(fsspec.Callback):
    """Hold a transfer to a number of bytes a second, by a sleep after each part; None: to no number."""

    def __init__(self, bytes_per_second: float | None) -> None:
        super().__init__()
        self.rate, self.began, self.sent = bytes_per_second or math.inf, time.monotonic(), 0

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> "Pace":
        """Return the callback of one of several files."""
        return self

    def relative_update(self, inc: int = 1) -> None:
        """Count the bytes of a part."""
        self.sent += inc
        time.sleep(max(0.0, self.sent / self.rate - (time.monotonic() - self.began)))
