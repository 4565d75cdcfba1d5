"""Odd names in records, by hundreds, to every reader: what is refused in words, what is used, and what leaks.

    python benchmarks/odd_names.py                  # 600 names to each reader: minutes
    python benchmarks/odd_names.py --names 100
    python benchmarks/odd_names.py --only manifest

A chain of two small stages is made, with a private file next to its results. Each name goes into each record, which is
otherwise consistent; the reader then does what it does in earnest. Every file that the process opens or links is
noted: one outside of the results is a leak. To measure another commit, run the same file in its tree.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest

from benchmarks.common import ROOT, command_line, head, row
from scripts.commands.migrate import take_runs
from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.commands.push import push as push_to_hub
from scripts.commands.push import verified_link
from scripts.commands.status import status_text
from scripts.commands.store import listed, verified
from scripts.errors import UserError
from scripts.files import read_json, sha256_file
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import sync_configs
from scripts.remote.remote_store import RemoteStore
from scripts.report.card import model_card
from scripts.report.chain import chain_text, read_chain
from scripts.report.verify import verify
from scripts.stage.consistency import exported_model
from scripts.stage.paths import StagePaths
from scripts.stage.publish import export_checkpoint, export_name, publish_checkpoint, take_export
from scripts.stage.push import push_published
from scripts.stage.remote import pull
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import SHORT
from tests.hub import Hub, turn_client
from tests.published import make_chain

SECONDS = 20
TOKEN = "hf_mayWrite0123456789"  # noqa: S105 - of the small hub of the tests
CARD = "---\ntags: []\nlibrary_name: transformers\n---\n"
SOUND = "tokenizer.json"
"""A name that every reader takes: a reader that refuses everything would look safe."""
SOUND_SOURCE, SOUND_LOG = "sft.jsonl", "reach.json"
PIECES = ("..", "..", ".", "", "a", "config.json", "owner.json", "identity.json", "cluster.x", "run", "A" * 300)
LETTERS = (
    "\0",
    "\n",
    "\x1b[2J",
    "\\",
    "\u2028",
    "\u202e",
    "e\u0301",
    "\ud800",
    " ",
    "%2f",
    "~",
    "$HOME",
    "*",
    ":",
    "\x7f",
)
WHOLE = ("", ".", "..", "/", "~/.ssh/id_ed25519", "record.json", "files.json", "remote.json", "pytorch_model.bin")
OUTCOMES = ("refused", "used", "traceback", "hung", "leaked")


@dataclass(frozen=True)
class Tree:
    """A chain of stages with the private file that no reader may open."""

    results: Path
    secret: Path

    @property
    def store(self) -> Path:
        """The folder of a remote store."""
        return self.results.parent / "remote"


def odd_names(count: int, secret: Path, folder: Path) -> list[str]:
    """Return as many names: of the secret in many writings first, then random ones, always the same."""
    drawn, found = random.Random(1), list(WHOLE)
    way = os.path.relpath(secret, folder)
    for start in (str(secret), f"/{secret}", way, f"./{way}", f"a/../{way}", f"config.json/../{way}"):
        found += [start, start.replace("/", "//"), f"{start}/.", start.replace("/", "\\")]
    while len(found) < count:
        parts = drawn.choices(PIECES, k=drawn.randint(1, 5))
        for _ in range(drawn.randint(0, 2)):
            place = drawn.randrange(len(parts))
            parts[place] += drawn.choice(LETTERS)
        name = "/" * (drawn.random() < 0.2) + "/".join(parts)
        found.append(name if drawn.random() < 0.9 else name * 20)
    return found[:count]


def write_record(path: Path, record: Any) -> None:
    """Write a record, whatever its names: a lone surrogate as JSON's escape."""
    path.write_text(json.dumps(record))


@contextmanager
def changed(path: Path, record: Any) -> Iterator[None]:
    """Let a file hold another record while the block runs."""
    before = path.read_bytes()
    write_record(path, record)
    try:
        yield
    finally:
        path.write_bytes(before)


def described(name: str, folder: Path) -> dict[str, Any]:
    """Return the description of the file that a name leads to, without a hash for every second one."""
    before = len(opened)
    try:
        path = folder / name
        size, sha256 = path.stat().st_size, sha256_file(path)
    except (OSError, ValueError):
        size, sha256 = 7, "0" * 64
    del opened[before:]  # a forger's reading is no reader's
    is_hashed = name in (SOUND, SOUND_SOURCE) or len(name) % 2
    return {"bytes": size, "sha256": sha256 if is_hashed else None}


opened: list[str] = []
"""Files that the process has opened, linked or renamed since the reader began."""

# --- readers: each puts a name into a record, and reads the record as Stagecoach does ---


@contextmanager
def in_export(tree: Tree, name: str) -> Iterator[Path]:
    """List a name among an export's files, with every hash of the list in agreement; the export's folder."""
    record_path, link = tree.results / "rlvr1/hf/record.json", tree.results / "rlvr1/hf/model"
    folder, record = link.resolve(), read_json(record_path)
    record["files"] |= {name: described(name, folder)}
    try:
        record["content"] = export_name(record["files"])
    except UnicodeEncodeError:  # no such hash can be written
        record["content"] = "0" * 16
    target, before = folder.with_name(record["content"]), link.readlink()
    folder.rename(target)
    link.unlink()
    link.symlink_to(target)
    try:
        with changed(record_path, record):
            yield link.parent
    finally:
        target.rename(folder)
        link.unlink()
        link.symlink_to(before)


def train_from_export(tree: Tree, name: str) -> None:
    """Start a stage from an export."""
    with in_export(tree, name) as hf:
        exported_model(hf / "record.json")


def push_export(tree: Tree, name: str) -> None:
    """Push an export to the hub."""
    with in_export(tree, name) as hf:
        push_to_hub(verified_link(hf, with_code=True), "org/model", CARD)


def take_anothers_export(tree: Tree, name: str) -> None:
    """Publish the export that another run made."""
    ckpt, hf = tree.results / "rlvr1/ckpt", tree.results / "rlvr1/hf"
    record = read_json(hf / "record.json")
    exports = (ckpt / "weights").resolve().parents[1] / "exports"
    note = exports / f"{export_name(read_json(ckpt / 'record.json')['files'])}.json"
    kept = (hf / "record.json").read_bytes(), (hf / "model").readlink()
    content = record["content"]
    record["files"] |= {name: described(name, exports / content)}
    write_record(note, record)
    try:
        if take_export(ckpt, hf):
            exported_model(hf / "record.json")
    finally:
        note.unlink()
        (hf / "record.json").write_bytes(kept[0])
        (hf / "model").unlink()
        (hf / "model").symlink_to(kept[1])


@contextmanager
def in_checkpoint(tree: Tree, name: str) -> Iterator[None]:
    """List a name among the files of a checkpoint, in its folder's list and in its record."""
    ckpt = tree.results / "rlvr1/ckpt"
    weights, record = (ckpt / "weights").resolve(), read_json(ckpt / "record.json")
    files = record["files"] | {name: described(name, weights)}
    with changed(ckpt / "record.json", record | {"files": files}), changed(weights / "files.json", files):
        yield


def resume(tree: Tree, name: str) -> None:
    """Look for a checkpoint to go on from, and publish it."""
    with in_checkpoint(tree, name):
        run = (tree.results / "rlvr1/run").resolve()
        found = TrainingFolder(run).newest_checkpoint()
        if found is None:
            raise UserError("no sound checkpoint")
        publish_checkpoint(found, tree.results.parent / "ckpt", read_json(tree.results / "rlvr1/ckpt/record.json"))


def export(tree: Tree, name: str) -> None:
    """Export a checkpoint."""
    with in_checkpoint(tree, name):
        export_checkpoint(tree.results / "rlvr1/ckpt", tree.results.parent / "hf")


def push_training(tree: Tree, name: str) -> None:
    """Push a training to a remote store."""
    with in_checkpoint(tree, name):
        push_published(RemoteStore(str(tree.store)), tree.results / "rlvr1/ckpt", weights=True)


def verify_checkpoint(tree: Tree, name: str) -> None:
    """Show and verify the lineage of a checkpoint."""
    with in_checkpoint(tree, name):
        lineage(tree)


def lineage(tree: Tree) -> None:
    """Show and verify a chain; UserError with what is found."""
    found = read_chain(tree.results / "rlvr1/ckpt")
    chain_text(found)
    if problems := verify(found).problems:
        raise UserError("\n".join(problems))


def verify_source(tree: Tree, name: str) -> None:
    """Verify a downloaded source."""
    name = SOUND_SOURCE if name == SOUND else name
    path = tree.results / "data/source/record.json"
    record = read_json(path)
    record["files"] |= {name: described(name, path.parent) | {"xxh3": "0" * 32}}
    with changed(path, record):
        lineage(tree)


def at_key(*keys: str, of: str = "rlvr1/ckpt/record.json") -> Callable[[Tree, str], None]:
    """Return the reader of a chain in one of whose records another value stands at a place."""

    def read(tree: Tree, name: str) -> None:
        path = tree.results / of
        record = read_json(path)
        inner = record
        for key in keys[:-1]:
            inner = inner[int(key) if key.isdecimal() else key]
        if name != SOUND:
            inner[keys[-1]] = name
        with changed(path, record):
            found = []
            for command in (lineage, model_card_of, plan):
                try:
                    command(tree)
                except UserError as error:
                    found.append(str(error))
            if found:
                raise UserError("\n".join(found))

    return read


def model_card_of(tree: Tree) -> None:
    """Write a model card."""
    str(model_card(tree.results / "rlvr1/hf"))


def plan(tree: Tree) -> None:
    """Plan and show the states; UserError where a stage is damaged."""
    recipe = load_recipe(SHORT)
    project = Project(recipe, load_site(ROOT / "config/sites/laptop.yaml", recipe), tree.results)
    shown = plan_text(project) + status_text(project)
    if "damaged" in shown:
        raise UserError("damaged")


def take_in_identity(tree: Tree, name: str) -> None:
    """Take in a run directory of an earlier commit, whose identity.json holds the name."""
    stage = tree.results / "old"
    (stage / "run").mkdir(parents=True)
    write_record(stage / "run/identity.json", read_json(tree.results / "sft/run/identity.json") | {"identity": name})
    try:
        list(take_runs(tree.results, StagePaths(stage)))
    finally:
        for path in sorted(stage.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        stage.rmdir()


def manifest_of_store(tree: Tree, name: str) -> None:
    """List, verify and pull a training whose manifest in a remote store lists the name."""
    name = SOUND_LOG if name == SOUND else name
    store = RemoteStore(str(tree.store))
    push_published(store, tree.results / "sft/ckpt", weights=True)
    identity = read_json(tree.results / "sft/ckpt/record.json")["identity"]
    (path,) = (tree.store / "trainings").glob(f"{identity}.*.json")
    manifest, run = read_json(path), tree.results.parent / "pulled" / identity
    some = manifest["files"]["config.yaml"]
    with changed(path, manifest | {"files": manifest["files"] | {name: some}}):
        project, again = SimpleNamespace(root=tree.results.parent), RemoteStore(store.url)
        list(listed(project, again))
        list(verified(RemoteStore(store.url), content=True))
        run.mkdir(parents=True, exist_ok=True)
        try:
            pull(RemoteStore(store.url), TrainingFolder(run), manifest["step"], is_whole=True)
        finally:
            shutil.rmtree(run)


READERS: dict[str, Callable[[Tree, str], None]] = {
    "export: start a stage": train_from_export,
    "export: push to the hub": push_export,
    "export: another run's note": take_anothers_export,
    "checkpoint: resume, publish": resume,
    "checkpoint: export": export,
    "checkpoint: push to a store": push_training,
    "checkpoint: lineage": verify_checkpoint,
    "source: lineage": verify_source,
    "stage in a record": at_key("stage"),
    "stage of a parent": at_key("parents", "0", "stage"),
    "identity of a parent": at_key("parents", "0", "identity"),
    "content of a parent": at_key("parents", "0", "content"),
    "blend in a record": at_key("data", "blend"),
    "content of an export": at_key("content", of="rlvr1/hf/record.json"),
    "identity of a run directory": take_in_identity,
    "manifest of a store": manifest_of_store,
}


# --- what comes of it ---


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a file that the process opens, links, copies or renames."""
    if event in ("open", "os.link", "os.symlink", "os.rename", "shutil.copyfile"):
        opened.extend(os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike))


def outcome_of(reader: Callable[[Tree, str], None], tree: Tree, name: str) -> str:
    """Let a reader read a name; return what came of it."""
    opened.clear()
    signal.alarm(SECONDS)
    outcome = "used"
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            reader(tree, name)
    except UserError as error:
        outcome = "refused"
        if "--show" in sys.argv:
            print(error, file=sys.__stderr__)
    except TimeoutError:
        outcome = "hung"
    except Exception:
        outcome = "traceback"
        if "--show" in sys.argv:
            traceback.print_exc()
    finally:
        signal.alarm(0)
    secret = str(tree.secret)
    read_it = any(os.path.realpath(path) == secret for path in opened if "\0" not in path)
    return "leaked" if read_it else outcome


def raise_timeout(*_: Any) -> None:
    """End a reader that waits."""
    raise TimeoutError


def main() -> None:
    """Print a row for each reader."""
    parser = command_line(__doc__)
    parser.add_argument("--names", type=int, default=600)
    parser.add_argument("--only", default="", help="readers with this word in the name")
    parser.add_argument("--show", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, raise_timeout)
    with tempfile.TemporaryDirectory() as name, Hub() as hub, pytest.MonkeyPatch.context() as patch:
        turn_client(patch, hub.url, Path(name, "hub"))
        patch.setenv("HF_TOKEN", TOKEN)
        hub.tokens[TOKEN] = True
        hub.writers.add(TOKEN)
        root = Path(name).resolve()
        tree = Tree(make_chain(root / "results/short", "sft", "rlvr1"), root / "home/credentials")
        tree.secret.parent.mkdir()
        tree.secret.write_text("aws_secret_access_key = 1234567890")
        sync_configs(load_recipe(SHORT), tree.results)
        export_folder = (tree.results / "rlvr1/hf/model").resolve()
        names = odd_names(3 if options.smoke else options.names, tree.secret, export_folder)
        store = RemoteStore(str(tree.store))
        if hasattr(store, "begin"):  # which earlier commits did without
            store.begin()
        sys.addaudithook(note_opened)
        print(head("reader", "a sound name", "odd names", *OUTCOMES))
        for reader, read in READERS.items():
            if options.only not in reader:
                continue
            counts = Counter(outcome_of(read, tree, each) for each in names)
            print(
                row(reader, outcome_of(read, tree, SOUND), len(names), *(counts[outcome] for outcome in OUTCOMES)),
                flush=True,
            )


if __name__ == "__main__":
    main()
