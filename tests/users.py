"""Other users of this machine, for tests that root runs: a folder that a group shares, and commands as its members."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_GROUP = 54320
ANN, BOB, EVE = 54321, 54322, 54323  # Eve is not of the group
# Where root keeps Python to itself, they get it in a mount namespace of their own, in which nothing else lies there.
SCRIPT = """set -e
if [ -n "$1" ]; then
    mount --bind "$2" /mnt
    mount -t tmpfs -o mode=755 tmpfs "$1"
    mkdir -p "$2"
    mount --bind /mnt "$2"
fi
umask "$3"
shift 3
exec "$@"
"""


def as_user(user: int, *command: str, umask: str = "002") -> list[str]:
    """A command line that runs a command as one of them."""
    home = Path(sys.base_prefix)
    closed = next((str(folder) for folder in reversed(home.parents) if not folder.stat().st_mode & 0o001), "")
    groups = "--clear-groups" if user == EVE else f"--groups={SHARED_GROUP}"
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", groups]
    return ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", closed, str(home), umask, *become, *command]


def can_be_others() -> bool:
    """Whether this process may run Python as another user."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        return False
    return not subprocess.run(
        as_user(ANN, sys.executable, "-c", "import yaml"), capture_output=True, check=False
    ).returncode


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of Ann's that the group shares and others may read; pytest's own let nobody else in."""
    folder = Path(tempfile.mkdtemp())
    try:
        share(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def share(folder: Path) -> None:
    """Make a tree Ann's, as one is that was made in a setgid folder under umask 002."""
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, ANN, SHARED_GROUP, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o2775 if path.is_dir() else path.stat().st_mode & 0o111 | 0o664)
