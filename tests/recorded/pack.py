"""Pack a finished run as a fixture: ``python -m tests.recorded.pack TREE RUN tests/recorded/trees/COMMIT-RUN.tar.xz``.

TREE is a clone in which `snakemake --config recipe=config/recipes/RUN.yaml run=RUN` has finished. Logs, tokens and pages are
left out; hosts are replaced. A folder that the recipe's `model.name` names below tests/ is packed, too.
"""

import base64
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

NOTED = ("rule", "input", "params", "record_format_version", "input_checksums", "starttime", "endtime")


def pack(tree: Path, run: str, archive: Path) -> None:
    """Write the archive: results, recipe, pretrained model, and Snakemake's notes as snakemake.json."""
    recipe, results = Path(f"config/recipes/{run}.yaml"), Path("results", run)
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder)
        shutil.copytree(
            tree / results, packed / results, symlinks=True, ignore=shutil.ignore_patterns("logs", "tokens")
        )
        model = yaml.safe_load((tree / recipe).read_text())["model"].get("name", "")
        if model.startswith("./tests"):
            shutil.copytree(tree / model, packed / model)
        (packed / recipe).parent.mkdir(parents=True)
        shutil.copy(tree / recipe, packed / recipe)
        for page in packed.rglob("*.html"):
            _rewrite(page, "a placeholder\n")
        hide_hosts(packed)
        kept = {name: note for name, note in notes_of(tree, *NOTED).items() if name.startswith(f"{results}/")}
        (packed / "snakemake.json").write_text(json.dumps(kept))
        with tarfile.open(archive, "w:xz") as file:
            for path in sorted(packed.iterdir()):
                file.add(path, path.name)


def _rewrite(path: Path, text: str) -> None:
    times = path.stat()
    path.write_text(text)
    os.utime(path, (times.st_atime, times.st_mtime))


def hide_hosts(folder: Path) -> None:
    """Replace hosts and processes in the attempts below a folder."""
    for attempts in folder.rglob("attempts.jsonl"):
        lines = [json.loads(line) for line in attempts.read_text().splitlines()]
        hidden = [line | ({"host": "a-host", "pid": 1} if line["event"] == "begin" else {}) for line in lines]
        _rewrite(attempts, "".join(json.dumps(line) + "\n" for line in hidden))


def notes_of(tree: Path, *keys: str) -> dict[str, dict]:
    """Return what Snakemake noted of each output, sorted by the output's name."""
    paths = [path for path in (tree / ".snakemake/metadata").rglob("*") if path.is_file()]
    noted = {base64.urlsafe_b64decode(path.name).decode(): json.loads(path.read_text()) for path in paths}
    return {name: {key: note.get(key) for key in keys} for name, note in sorted(noted.items())}


if __name__ == "__main__":
    pack(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
