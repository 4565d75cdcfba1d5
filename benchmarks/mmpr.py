"""How long MMPR's preparation takes, and how much memory, beside a bare extraction of the same archive.

    python benchmarks/mmpr.py > benchmarks/mmpr.md

Writes an MMPR of random bytes to a temporary folder: 30,000 images of 20 KB in 30 subsets, and six rows an image. Runs
the standard library's extraction, then the preparation with 1 and with 4 threads. Seconds are of the whole
program; memory is the largest process's.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head, row

IMAGES, SUBSETS, ROWS_AN_IMAGE, BYTES = 30_000, 30, 6, 20_000
BARE = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"


def publish(folder: Path, count: int) -> None:
    """Write meta.json, annotations.zip and images.zip."""
    random.seed(7)
    noise = random.randbytes(1 << 20)
    text = "Because the angles of a triangle add up to 180 degrees. " * 10
    meta = {}
    with ZipFile(folder / "images.zip", "w", ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(count):
            start = random.randrange(len(noise) - BYTES)
            name = f"MMPR/images/set{number % SUBSETS}/{number}.png"
            archive.writestr(name, noise[start : start + BYTES])
    with ZipFile(folder / "annotations.zip", "w", ZIP_DEFLATED) as archive:
        for subset in range(SUBSETS):
            images = [f"{number}.png" for number in range(subset, count, SUBSETS)] * ROWS_AN_IMAGE
            rows = [{"image": it, "question": "Why?", "chosen": text, "rejected": text} for it in images]
            name = f"MMPR/annotations/set{subset}.jsonl"
            archive.writestr(name, "".join(json.dumps(row) + "\n" for row in rows))
            meta[f"set{subset}"] = {
                "root": f"MMPR/images/set{subset}",
                "annotation": f"/mnt/{name}",
                "length": len(rows),
            }
    (folder / "meta.json").write_text(json.dumps(meta))
    record = {"blends": {name: {"source": "noise", "revision": "7"} for name in ("mpo1", "mpo4")}, "files": {}}
    (folder / "record.json").write_text(json.dumps(record))


def timed(what: str, *command: str) -> None:
    """Run a command and print a row of the table."""
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: ended with status {process.returncode}")
    print(row(what, f"{time.monotonic() - start:.0f}", f"{usage.ru_maxrss / 1024:.0f}"), flush=True)


def main() -> None:
    """Print the table."""
    count = SUBSETS if command_line(__doc__).parse_args().smoke else IMAGES
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        publish(folder, count)
        print(f"{count} images of {BYTES // 1000} KB, {count * ROWS_AN_IMAGE} rows, {os.cpu_count()} cores\n")
        print(head("", "seconds", "MB"))
        timed("bare extraction", sys.executable, "-c", BARE, str(folder / "images.zip"), str(folder / "bare"))
        os.sync()
        for threads in (1, 4):
            output = folder / f"mpo{threads}"
            program = [sys.executable, "-m", "scripts.data.mmpr", f"--source={folder}", f"--output={output}"]
            program += [f"--source-record={folder}/record.json", f"--threads={threads}"]
            timed(f"preparation, threads: {threads}", *program)


if __name__ == "__main__":
    main()
