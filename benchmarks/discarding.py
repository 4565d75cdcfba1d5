"""Strikes on discard: links that it must see, and kills, stops, errors and full disks while trainings are removed.

    python benchmarks/discarding.py --strikes 200 --output benchmarks/discarding.md    (as root, with strace)

Root makes results that Ann and Bob share: Ann's trainings, of which some are published by Bob in a folder that he keeps
closed, some by links on another disk, and some by nobody. Ann calls `stagecoach discard` again and again, and each
call is struck: killed at a random moment or at a call of the kernel, stopped for longer than the heartbeat, given an
error of the disk by strace, or run where the disk is full. Meanwhile Bob, who may not write to the trainings, publishes
some. In the end what is published must be whole, what nobody uses must be gone, and nothing may be half made.

`--scripts` strikes another commit's scripts, for the figures before.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, end_for_lack_of, head, row
from tests.users import ANN, BOB, as_user, can_be_others, share

KINDS = ("kill", "kill at a call", "stop", "error", "full disk", "two at once")
CALLS = ("rename", "unlinkat", "link", "openat", "fsync", "mkdir", "rmdir", "newfstatat", "readlink")
ERRORS = ("EIO", "ESTALE", "EACCES", "ENOSPC", "EDQUOT")
TRAININGS = 12
CHAINS = 4
DISCARD = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from scripts.commands.__main__ import main
from scripts.errors import run_program
from scripts.stage import owner
owner.HEARTBEAT_SECONDS = 0.3
sys.argv = ["stagecoach", *sys.argv[1:]]
run_program(main)
"""
PUBLISH = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from scripts.errors import CutOffError
from scripts.files import link_to
results, name, number = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
training, stage = results / "store" / name, results / "bob" / f"sft{number}"
if not training.is_dir():
    sys.exit(3)
link_to(stage / "run", training)
try:
    from scripts.stage.removal import await_discards
    await_discards(training)
except ImportError:
    pass
except CutOffError:
    (stage / "run").unlink()
    sys.exit(3)
if not training.is_dir():
    (stage / "run").unlink()
    sys.exit(3)
"""


class World:
    """Results that Ann and Bob share, and what of them is published."""

    def __init__(self, folder: Path, scripts: Path, files: int) -> None:
        self.folder, self.scripts, self.files = folder, scripts, files
        self.results = folder / "results"
        self.store = self.results / "store"
        (folder / "config").mkdir(parents=True)
        config = f"recipe: {ROOT}/config/recipes/tiny.yaml\nsite: laptop\n"
        (folder / "config/config.yaml").write_text(config)
        for number in range(TRAININGS):
            self.train(f"{number:016x}")
        share(folder)
        for path in (self.store, *self.store.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # Bob may read them, and not write there
        self.published: set[str] = set()
        disk = folder / "disk"
        for number in range(TRAININGS // 3):
            self.link(self.results / f"bob/sft{number}", f"{number:016x}")
        self.link(disk / "sft", f"{TRAININGS // 3:016x}")
        (self.results / "elsewhere").symlink_to(disk)
        bobs = self.results / "bob"
        for path in (bobs, *bobs.rglob("*")):
            os.chown(path, BOB, BOB, follow_symlinks=False)

    def train(self, name: str) -> None:
        """Make a training of many small files."""
        for step in (2, 4):
            checkpoint = self.store / name / f"checkpoints/step_{step}"
            checkpoint.mkdir(parents=True)
            for number in range(self.files):
                (checkpoint / f"shard-{number}").write_bytes(b"weights")
        (self.store / name / "identity.json").write_text(json.dumps({"identity": name}))

    def link(self, stage: Path, name: str) -> None:
        """Publish a training as a stage."""
        stage.mkdir(parents=True)
        (stage / "run").symlink_to(self.store / name)
        self.published.add(name)

    def close(self, is_closed: bool) -> None:
        """Let Bob close his folder, or open it."""
        (self.results / "bob").chmod(0o700 if is_closed else 0o755)

    def discard(self, *before: str) -> list[str]:
        """Ann's call, as a command."""
        program = [
            *before,
            sys.executable,
            "-c",
            DISCARD,
            str(self.scripts),
            "--directory",
            str(self.folder),
            "discard",
        ]
        return as_user(ANN, *program, umask="022")

    def call(self, *before: str) -> subprocess.CompletedProcess:
        """Let Ann discard, unstruck."""
        return subprocess.run(self.discard(*before), capture_output=True, text=True, timeout=120, check=False)

    def publish(self, name: str, number: int) -> bool:
        """Let Bob publish a training; False where it was gone, as he is told."""
        program = [sys.executable, "-c", PUBLISH, str(self.scripts), str(self.results), name, str(number)]
        done = subprocess.run(as_user(BOB, *program, umask="022"), capture_output=True, text=True, check=False)
        return done.returncode == 0

    def visible(self) -> set[str]:
        """The names of the trainings in the store."""
        return {path.name for path in self.store.iterdir() if not path.name.startswith(".")}

    def is_whole(self, name: str) -> bool:
        """Whether all files of a training are there."""
        folders = [self.store / name / f"checkpoints/step_{step}" for step in (2, 4)]
        return all(folder.is_dir() and len([*folder.iterdir()]) == self.files for folder in folders)

    def faults(self, is_over: bool) -> list[str]:
        """What is wrong: a published training that is not whole, a half one, and at the end what is left."""
        found = [f"lost: {name}" for name in sorted(self.published) if not self.is_whole(name)]
        there = self.visible()
        found += [f"half made: {name}" for name in sorted(there - self.published) if not self.is_whole(name)]
        if is_over:
            found += [f"left: {path.name}" for path in self.store.iterdir() if path.name.startswith(".")]
            found += [f"left: {path}" for path in self.store.rglob("*.tmp")]
            found += [f"for ever in the way: {name}" for name in sorted(there - self.published)]
        return found


def strike(world: World, kind: str, rng: random.Random) -> str:
    """Let Ann discard and strike the call; return in words what it was."""
    if kind == "kill at a call":
        call, number = rng.choice(CALLS), rng.randint(1, 60)
        world.call("strace", "-f", "-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={number}")
        return f"SIGKILL at {call} {number}"
    if kind == "error":
        call, error, number = rng.choice(CALLS), rng.choice(ERRORS), rng.randint(1, 40)
        when = f"{number}{rng.choice(('', '+', '+3'))}"
        path = rng.choice((str(world.store), str(world.results)))
        world.call("strace", "-f", "-o", "/dev/null", "-P", path, "-e", f"inject={call}:error={error}:when={when}")
        return f"{error} of {call} {when} below {Path(path).name}"
    if kind == "two at once":
        callers = [subprocess.Popen(world.discard(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in "ab"]
        time.sleep(rng.uniform(0.2, 1.0))
        callers[0].kill()
        for caller in callers:
            caller.communicate(timeout=120)
        return "two at once, one of them killed"
    process = subprocess.Popen(
        world.discard(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    time.sleep(rng.uniform(0.1, 1.2))
    words = "SIGKILL"
    with suppress(ProcessLookupError):
        if kind == "stop":
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(1.0)  # longer than the heartbeat
            words = "SIGSTOP over the heartbeat"
            if rng.random() < 0.5:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGCONT)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    return words


def fill_disk(world: World, rng: random.Random) -> str:
    """Let Ann discard where the kernel has no room for a file: every file made for writing is refused."""
    error = rng.choice(("ENOSPC", "EDQUOT"))
    world.call("strace", "-f", "-o", "/dev/null", "-e", f"inject=write,pwrite64,link:error={error}:when=4+")
    return f"{error} for every file"


def chain(folder: Path, scripts: Path, strikes: int, seed: int, until: float) -> tuple[Counter, list[str]]:
    """Strike one world, until a time at most; return strikes by kind, and the faults."""
    rng, struck, faults = random.Random(seed), Counter(), []
    files = 20
    world = World(folder, scripts, files)
    world.close(is_closed=True)
    struck_closed = strikes // 4
    number = 100
    for turn in range(strikes):
        if time.monotonic() > until:
            world.close(is_closed=False)
            break
        if turn == struck_closed:
            faults += [fault for fault in world.faults(is_over=False) if fault not in faults]
            world.close(is_closed=False)
        kind = rng.choice(KINDS)
        others = sorted(
            {path.name for path in world.store.iterdir() if not path.name.startswith(".")} - world.published
        )
        publisher = None
        if others and rng.random() < 0.25:
            wanted = rng.choice(others)
            number += 1
            program = [sys.executable, "-c", PUBLISH, str(scripts), str(world.results), wanted, str(number)]
            publisher = subprocess.Popen(as_user(BOB, *program, umask="022"), stderr=subprocess.PIPE)
        fill_disk(world, rng) if kind == "full disk" else strike(world, kind, rng)
        struck[kind] += 1
        if publisher is not None and publisher.wait(timeout=120) == 0:
            world.published.add(wanted)
            struck["published meanwhile"] += 1
        faults += [fault for fault in world.faults(is_over=False) if fault not in faults]
        if not others:  # nothing is left to discard: Ann trains more
            for _ in range(4):
                name = f"{rng.getrandbits(64):016x}"
                world.train(name)
                for path in (world.store / name, *(world.store / name).rglob("*")):
                    os.chown(path, ANN, ANN)
                    path.chmod(0o755 if path.is_dir() else 0o644)
    for _ in range(3):
        world.call()
    faults += [fault for fault in world.faults(is_over=True) if fault not in faults]
    return struck, faults


def closed_links(folder: Path, scripts: Path) -> tuple[int, int]:
    """Let Ann discard while Bob's folder with seven published trainings is closed; return freed and published ones."""
    world = World(folder, scripts, 3)
    (world.results / "elsewhere").unlink()
    world.published.remove(f"{TRAININGS // 3:016x}")
    for number in range(TRAININGS // 3, 7):
        world.link(world.results / f"bob/sft{number}", f"{number:016x}")
    for path in (world.results / "bob").rglob("*"):
        os.chown(path, BOB, BOB, follow_symlinks=False)
    world.close(is_closed=True)
    world.call()
    return sum(not world.is_whole(name) for name in world.published), len(world.published)


def main() -> None:
    """Strike, and print or write the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="end the strikes after so long")
    parser.add_argument("--scripts", type=Path, default=ROOT, help="the clone whose discard is struck")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not can_be_others():
        end_for_lack_of("root, to be other users")
    if shutil.which("strace") is None:
        end_for_lack_of("strace")
    strikes = 6 if arguments.smoke else arguments.strikes
    base = Path(tempfile.mkdtemp(prefix="discarding-"))
    base.chmod(0o755)
    scripts = arguments.scripts.resolve()
    try:
        gone, all_ = closed_links(base / "closed", scripts)
        until = time.monotonic() + 60 * arguments.minutes
        with ThreadPoolExecutor(CHAINS) as pool:
            asked = [
                pool.submit(chain, base / f"struck{one}", scripts, -(-strikes // CHAINS), arguments.seed + one, until)
                for one in range(CHAINS)
            ]
        struck = sum((each.result()[0] for each in asked), Counter())
        faults = [fault for each in asked for fault in each.result()[1]]
    finally:
        shutil.rmtree(base, ignore_errors=True)
    kinds = Counter(re.sub(r": .*", "", fault) for fault in faults)
    lines = [
        "# Strikes on discard",
        "",
        f"`python benchmarks/discarding.py --strikes {strikes} --seed {arguments.seed}` on 2 CPU cores, shared with "
        f"other work: {sum(struck[kind] for kind in KINDS)} strikes on {CHAINS} trees at once.",
        "",
        f"Published trainings in a colleague's closed folder that discard freed: {gone} of {all_}.",
        "",
        head("strike", "count"),
        *(row(kind, count) for kind, count in sorted(struck.items()) if kind != "published meanwhile"),
        "",
        f"Trainings that Bob published while Ann's call was struck: {struck['published meanwhile']}.",
        "",
        head("fault", "count"),
        *(row(kind, kinds[kind]) for kind in ("lost", "half made", "left", "for ever in the way")),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    print("\n".join(faults), file=sys.stderr)
    if arguments.output and not arguments.smoke:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
