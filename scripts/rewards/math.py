"""math_with_judge, without its judge: the response's answer is mathematically equal to the expected one."""

import json
import subprocess
import sys
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from math_verify import parse
from math_verify import verify as equal


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if math-verify finds in the response (boxed answers first) a value equal to ``expected_answer``, else 0.0."""
    return _equal(row["expected_answer"], response)


@lru_cache(maxsize=65536)
def _equal(expected: str, response: str) -> float:
    if threading.current_thread() is threading.main_thread():
        return _judge(expected, response)
    return _helper().judge(expected, response)


def _judge(expected: str, response: str) -> float:
    gold = parse(rf"\boxed{{{expected}}}")
    return float(bool(gold) and equal(gold, parse(response)))


class _Helper:
    """Judges in a process of its own: math-verify's time limits are alarm signals, which only a main thread hears."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.rewards.math"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def judge(self, expected: str, response: str) -> float:
        """What `_judge` says there."""
        with self._lock:
            print(json.dumps([expected, response]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that judges math answers ended with status {self._process.wait()}")
        return float(answer)


@cache
def _helper() -> _Helper:
    return _Helper()


def main() -> None:
    """Judge one answer a line, a JSON list of the expected answer and the response, until the input ends."""
    for line in sys.stdin:
        print(_judge(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
