"""The real NeMo-Gym, asked for its verdict on rows and responses. It lives in an environment of its own: `make gym`."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.rewards.gym import output_items
from tests.conftest import ROOT

PYTHON = Path(os.environ.get("STAGECOACH_GYM_PYTHON", ROOT / ".venv-gym/bin/python"))
SERVERS = Path(__file__).with_name("servers.py")
needs_gym = pytest.mark.skipif(
    not (PYTHON.exists() and PYTHON.parents[1].joinpath("installed").exists()),
    reason=f"NeMo-Gym is not installed at {PYTHON.parents[1]}: make gym",
)

Items = list[dict[str, Any]]


class Verdict(NamedTuple):
    """What a server answered: 422 refuses the row, 500 is a server that failed, as it does where it asks a judge.

    `reward` is None unless the status is 200; it is None there too where the server cannot be asked, which `says` tells.
    """

    status: int
    reward: float | None
    says: str


def gym_verify(pairs: Iterable[tuple[dict[str, Any], str | Items]], checkout: str | None = None) -> list[Verdict]:
    """The verdict of the server of each row's agent on a response, a text or the items of an output.

    `checkout` names a checkout of Gym to ask instead of the release installed.
    """
    lines = [
        json.dumps({"row": row, "output": output_items(response) if isinstance(response, str) else response})
        for row, response in pairs
    ]
    done = subprocess.run(
        [PYTHON, SERVERS, *([checkout] if checkout else [])],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = [Verdict(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(lines), done.stderr[-3000:]
    return verdicts
