"""Try each patch on the pinned release's own source: its tests fail before it and pass after it.

``.venv/bin/python upstream/check.py`` makes the table of upstream/README.md. It needs git and a package index.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINS = (HERE.parent / "envs/controller.txt").read_text(encoding="utf-8").splitlines()
GIT = ["git", "-c", "user.name=check", "-c", "user.email=check@localhost", "-c", "commit.gpgsign=false"]


def released_source(package: str, folder: Path) -> Path:
    """The source of the package's pinned release, in a repository of its own."""
    pin = next(line for line in PINS if line.startswith(f"{package}=="))
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        folder,
    ]
    subprocess.run([*download, pin], check=True, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    tree = next(path for path in folder.iterdir() if path.is_dir())
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", pin]):
        subprocess.run([*GIT, *command], cwd=tree, check=True)
    return tree


def outcome(tree: Path, tests: list[str]) -> tuple[int, str]:
    """The exit status of these tests with the packages of the tree, and pytest's last line."""
    path = os.pathsep.join(str(folder) for folder in (tree / "src", tree) if folder.is_dir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.strip().splitlines()[-1].strip("= ")


def main() -> None:
    """Check all patches; exit status 1 where one does not hold what it says."""
    print("| patch | without it | with it | seconds |\n| --- | --- | --- | --- |")
    holds = True
    for patches in sorted(path for path in HERE.iterdir() if path.is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            tree = released_source(patches.name, Path(folder))
            for patch in sorted(patches.glob("*.patch")):
                start = time.monotonic()
                subprocess.run([*GIT, "apply", "--include=tests/*", patch], cwd=tree, check=True)
                tests = subprocess.run(
                    ["git", "ls-files", "--others", "--exclude-standard", "tests"],
                    cwd=tree,
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout.split()
                before, said_before = outcome(tree, tests)
                subprocess.run(["git", "clean", "--quiet", "--force", "-dx"], cwd=tree, check=True)
                subprocess.run([*GIT, "am", "--quiet", patch], cwd=tree, check=True)
                after, said_after = outcome(tree, tests)
                subprocess.run(["git", "reset", "--quiet", "--hard", "HEAD~1"], cwd=tree, check=True)
                holds &= before == 1 and after == 0
                seconds = round(time.monotonic() - start)
                print(f"| {patches.name}/{patch.name} | {said_before} | {said_after} | {seconds} |", flush=True)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
