"""Fetch NeMo-RL's releases, each at the revision of envs/nemo-rl.yaml: ``python -m tests.nemo_rl.checkouts FOLDER``.

A release that is there stays. Gym and Automodel come along; the tests read no other submodule.
"""

import subprocess
import sys
from pathlib import Path

from scripts.backends.nemo_rl.releases import release_of
from tests.production import TRIED

URL = "https://github.com/NVIDIA-NeMo/RL.git"
SUBMODULES = ("3rdparty/Gym-workspace/Gym", "3rdparty/Automodel-workspace/Automodel")


def fetch(release: str, folder: Path) -> None:
    """Fetch the files of a release, without history."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", folder, *words], check=True)

    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet")
    git("fetch", "--quiet", "--depth=1", URL, release_of(release).revision)
    git("-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD")
    git("submodule", "--quiet", "update", "--init", "--depth=1", *SUBMODULES)


if __name__ == "__main__":
    for name in TRIED:
        if not (place := Path(sys.argv[1], name)).exists():
            print(f"{name}: fetching NeMo-RL into {place}", flush=True)
            fetch(name, place.with_name(f"{name}.part"))
            place.with_name(f"{name}.part").rename(place)
