"""The pace of a transfer."""

import math
import time
from typing import Any

import fsspec


class Pace(fsspec.Callback):
    """Hold a transfer's files together to a number of bytes a second, by a sleep after each part; None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        super().__init__()
        self.rate, self.began = bytes_per_second or math.inf, time.monotonic()

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> "FilePace":
        """Return the callback of one of several files."""
        return FilePace(self)

    def relative_update(self, inc: int = 1) -> None:
        """Count the bytes of a part."""
        self.value += inc
        time.sleep(max(0.0, self.value / self.rate - (time.monotonic() - self.began)))


class FilePace(fsspec.Callback):
    """Count a file's bytes towards the transfer: s3fs tells those of a part, gcsfs all so far."""

    def __init__(self, whole: Pace) -> None:
        super().__init__()
        self.whole = whole

    def relative_update(self, inc: int = 1) -> None:
        """Count the bytes of a part."""
        self.value += inc
        self.whole.relative_update(inc)

    def absolute_update(self, value: int) -> None:
        """Count the bytes since the last update."""
        self.relative_update(value - self.value)
