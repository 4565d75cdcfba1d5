"""Strikes on pushes, fetches and prunes of a remote store, and several of these at once.

    python benchmarks/remote_together.py --strikes 200 --output benchmarks/remote_together.md    (with envs/remote.txt)

Each process is a real one and is killed by SIGKILL at a random moment, or stopped by SIGSTOP for longer than its claim
lasts. After each strike every manifest in the store must be whole by hash, and no checkpoint half made. At the end the
next calls must go on, and nothing may be left of the killed.
"""

import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import command_line, end_for_lack_of, head, row
from benchmarks.remote import KEYS, expect, serving_s3, training
from scripts.commands.store import verified
from scripts.remote import claims
from scripts.remote.pruning import prune
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import FETCHED, pull, push
from scripts.stage.rundir import ELSEWHERE
from scripts.stage.training_folder import TrainingFolder

FORK = multiprocessing.get_context("fork")
MEGABYTES, SHARED, TRIALS, RACES = 8, 3, 67, 40
DAYS_AGO = 2 * 86400
LEASE = 8.0
"""A claim's seconds in this program, so that a stop may last longer."""


@dataclass
class Counts:
    """What strikes left: manifests that are not whole, half-made checkpoints, and calls that failed afterwards."""

    strikes: int = 0
    broken: int = 0
    half: int = 0
    failed: int = 0


def begin(deed: Callable[[], object]) -> multiprocessing.Process:
    """Run a deed in a process of its own."""

    def quietly() -> None:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            deed()

    process = FORK.Process(target=quietly)
    process.start()
    return process


def succeeds(deed: Callable[[], object]) -> bool:
    """Whether a deed ends well in a process of its own."""
    process = begin(deed)
    process.join()
    return process.exitcode == 0


def age(url: str, data: Path | None) -> None:
    """Let all files of a store be two days old, by the clock of its server."""
    folder = Path(url) if data is None else data / url.removeprefix("s3://")
    then = time.time() - DAYS_AGO
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".push", ".prune"):
            os.utime(path, (then, then))


def asked(question: Callable[[], object]) -> object:
    """Return a question's answer from a process of its own: the client of a bucket does not survive a fork."""
    here, there = FORK.Pipe()
    process = begin(lambda: there.send(question()))
    process.join()
    if not here.poll():
        sys.exit(f"{question}: ended without an answer")
    return here.recv()


def broken_in(url: str) -> int:
    """Return how many files of manifests are missing, cut or of another content."""
    return asked(lambda: len([*verified(RemoteStore(url), content=True)]))


def half_made(folder: Path) -> int:
    """Return how many checkpoints of a training's folder are neither whole nor marked as elsewhere."""
    return sum(
        each.damage() is not None for each in TrainingFolder(folder).checkpoints if not (each.path / ELSEWHERE).exists()
    )


def struck(deed: Callable[[], object], before: Callable[[], object], url: str, target: Path, strikes: int) -> Counts:
    """Kill a deed at random moments, until it has been struck so often; `before` makes ready for each."""
    counts = Counts()
    shortest = math.inf
    while counts.strikes < strikes:
        expect(succeeds(before), "what comes before a strike")
        process = begin(deed)
        process.join(None if shortest == math.inf else shortest * random.uniform(0.02, 1.1))
        if process.exitcode is None:
            process.kill()
            process.join()
            counts.strikes += 1
            counts.broken += broken_in(url)
            counts.half += half_made(target)
        began = time.monotonic()
        counts.failed += not succeeds(deed)
        shortest = min(shortest, time.monotonic() - began)
    return counts


def strikes_on(url: str, root: Path, data: Path | None, strikes: int) -> dict[str, Counts]:
    """Strike a push, a fetch and a prune of a training, over and over again."""
    run, other = training(root / "struck", MEGABYTES, 1), training(root / "struck", MEGABYTES, 2)
    target = root / "taken" / run.name
    expect(succeeds(lambda: push(RemoteStore(url), TrainingFolder(other), "sft")), "a push")

    def pushes() -> None:
        push(RemoteStore(url), TrainingFolder(run), "sft")

    def fetches() -> None:
        pull(RemoteStore(url), TrainingFolder(target), 4, is_whole=True)

    def prunes() -> None:
        prune(RemoteStore(url), [(run.name, 4)])

    def empties() -> None:
        pushes()
        if target.exists():
            target.rename(root / f"emptied-{time.monotonic_ns()}")

    counts = {
        "push": struck(pushes, prunes, url, target, strikes),
        "fetch": struck(fetches, empties, url, target, strikes),
        "prune": struck(prunes, pushes, url, target, strikes),
    }
    expect(succeeds(pushes) and succeeds(fetches), "calls after all strikes")
    age(url, data)
    expect(succeeds(lambda: prune(RemoteStore(url), [])), "a prune after all strikes")

    def unnamed() -> int:
        store = RemoteStore(url)
        named = {file["sha256"] for it in store.manifests() for file in it["files"].values()}
        return len(store.objects().keys() - named)

    counts["left after all"] = Counts(broken=asked(unnamed) + len([*target.glob(f"{FETCHED}*")]))
    return counts


def fetched_together(url: str, root: Path, trials: int) -> Counter[str]:
    """Let two processes fetch one checkpoint at once; count the trials in which both succeed and all is whole."""
    run = training(root / "parent", MEGABYTES, 3)
    expect(succeeds(lambda: push(RemoteStore(url), TrainingFolder(run), "sft")), "a push")
    found: Counter[str] = Counter()
    for trial in range(trials):
        target = root / f"child{trial}" / run.name
        target.mkdir(parents=True)
        both = [begin(partial(pull, RemoteStore(url), TrainingFolder(target), 4, is_whole=True)) for _ in range(2)]
        for process in both:
            process.join()
        found["both succeed"] += all(process.exitcode == 0 for process in both)
        found["whole"] += bool(TrainingFolder(target).checkpoints) and half_made(target) == 0
        found["left"] += (target / FETCHED).exists()
        shutil.rmtree(target.parent)
    return found


def raced(url: str, root: Path, data: Path | None, races: int) -> Counter[str]:
    """Let two pushes and two prunes begin at random moments, over old objects without a manifest; count what breaks.

    In every fourth race a push or a prune is stopped for longer than its claim lasts.
    """
    first, second, third = (training(root / "raced", SHARED, salt) for salt in (4, 5, 6))
    found: Counter[str] = Counter()
    for race in range(races):
        for run in (first, third):
            expect(succeeds(partial(push, RemoteStore(url), TrainingFolder(run), "sft")), "a push")
        folder = Path(url) if data is None else data / url.removeprefix("s3://")
        (folder / f"trainings/{first.name}.4.json").unlink()
        age(url, data)
        deeds = [
            partial(push, RemoteStore(url), TrainingFolder(first), "sft"),
            partial(push, RemoteStore(url), TrainingFolder(second), "sft"),
            partial(prune, RemoteStore(url), [(third.name, 4)]),
            partial(prune, RemoteStore(url), []),
        ]
        random.shuffle(deeds)
        processes = []
        for deed in deeds:
            processes.append((deed.func.__name__, begin(deed)))
            time.sleep(random.uniform(0, 0.15))
        if race % 4 == 0:
            _, stopped = random.choice(processes)
            if stopped.exitcode is None:
                os.kill(stopped.pid, signal.SIGSTOP)
                time.sleep(1.5 * LEASE)
                os.kill(stopped.pid, signal.SIGCONT)
                found["stopped"] += 1
        for name, process in processes:
            process.join()
            found[f"{name} said no"] += process.exitcode != 0
        pushed_well = all(process.exitcode == 0 for name, process in processes if name == "push")
        is_there = {first.name, second.name} <= asked(lambda: {*RemoteStore(url).steps()})
        found["races"] += 1
        found["pushed and not there"] += pushed_well and not is_there
        found["broken"] += broken_in(url) > 0
        expect(succeeds(lambda: prune(RemoteStore(url), [(second.name, 4)])), "a prune")
    return found


@contextmanager
def place(kind: str, root: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield a new store's URL, and the folder of the server behind a bucket."""
    if kind == "folder":
        RemoteStore(str(root / "remote")).begin()
        yield str(root / "remote"), None
        return
    data = root / "served"
    (data / "bucket").mkdir(parents=True)
    with serving_s3(data) as address:
        os.environ["AWS_ENDPOINT_URL"] = address
        yield "s3://bucket/store", data


def in_words(found: Counter[str]) -> str:
    """Return counts for people."""
    return ", ".join(f"{name} {count}" for name, count in found.items())


def main() -> None:
    """Measure, and write the page."""
    parser = command_line(__doc__)
    parser.add_argument("--strikes", type=int, default=60, help="on each of push, fetch and prune")
    parser.add_argument("--kinds", nargs="+", default=["folder", "s3"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if "s3" in arguments.kinds and not shutil.which("rclone"):
        end_for_lack_of("rclone")
    strikes, trials, races = (1, 1, 1) if arguments.smoke else (arguments.strikes, TRIALS, RACES)
    if "s3" in arguments.kinds:
        import s3fs  # noqa: F401, PLC0415 - once, and not in each of the processes
    os.environ.update(KEYS | {"AWS_DEFAULT_REGION": "us-east-1"})
    claims.LEASE, claims.RENEWED, claims.PAUSE = LEASE, LEASE / 8, 0.05
    random.seed(1)
    lines = ["# Pushes, fetches and prunes under strikes, and at once", ""]
    lines += [f"`python benchmarks/remote_together.py --strikes {strikes}` on {os.cpu_count()} cores.", ""]
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="together-") as folder, place(kind, Path(folder)) as (url, data):
            counts = strikes_on(url, Path(folder), data, strikes)
            together = fetched_together(url, Path(folder), trials)
            races_run = raced(url, Path(folder), data, races)
        lines += [f"## {kind}", "", head("struck", "strikes", "manifests not whole", "half-made", "next call failed")]
        lines += [row(name, it.strikes, it.broken, it.half, it.failed) for name, it in counts.items()]
        lines += ["", f"Two fetches of one checkpoint at once, {trials} times: {in_words(together)}."]
        lines += ["", f"Two pushes and two prunes at once: {in_words(races_run)}.", ""]
        print("\n".join(lines), flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
