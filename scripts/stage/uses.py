"""Find what uses the trainings of a store: links of stages, amendments, mount points that may hide links.

A link counts from any folder of results within reach: of any run, trial or stage, through links to folders on other
disks and to the results of more projects. An unreadable place counts as use: a folder without permission, an error of
the disk or the file server, a loop, a link to a disk without a mount. Only "no such file" means that no link is there.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.errors import UserError, warn
from scripts.files import sha256_text, write_text
from scripts.records import Amendments, read_if_there
from scripts.stage.paths import STORE
from scripts.stage.training_folder import TrainingFolder

OF_STAGE = ("run", "ckpt", "hf")
"""Entries of a stage's folder."""
INSIDE = ("ckpt", "hf", "quantized", "exports")
"""Folders of a stage that hold links into the store."""
LINKS = ("run", "exports", "weights", "model", "adapter")
"""Names of the links into the store."""
WITHOUT_STAGES = ("data", "settings", "logs", "slurm-logs")
"""Folders of a run without stages; a run may have one of the names."""
OF_DISK = "lost+found"
STAGES_BELOW = 3
"""How deep below the results a stage may lie: run, trial, stage."""
LINKED_FOLDERS = 4
"""How many links to folders are followed one behind the other."""
FOLDERS_AROUND = 5
"""How many folders around a link's target count as linked: exports/<content>/..., checkpoints/step_N/..."""
PROJECTS = ".projects"
"""The folder of the store with a list of further projects' results, for which the store is a link."""
MOUNTS = Path("/etc/fstab")


@dataclass
class Uses:
    """Uses of a store: `links` by real target and by the folders around the target; `unknown` places with reasons."""

    links: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    unknown: dict[Path, str] = field(default_factory=dict)

    def of(self, folder: Path) -> list[Path]:
        """Return the links to a folder and into the folder."""
        return self.links.get(os.path.realpath(folder), [])

    def add(self, link: Path, target: str) -> None:
        """Note a link to a real path, for the path and the folders around it."""
        path = Path(target)
        for folder in (path, *path.parents[:FOLDERS_AROUND]):
            self.links[str(folder)].append(link)

    def words_of_unknown(self) -> str:
        """Describe the first unreadable place, and count the rest."""
        place, why = next(iter(self.unknown.items()))
        others = f", and {len(self.unknown) - 1} places more" if len(self.unknown) > 1 else ""
        return f"{place} may use it: {why}{others}"


def find_uses(root: Path) -> Uses:
    """Return the uses of the store of `root`, the folder of all runs' results."""
    look = _Look(root)
    for results in _projects_of(root, look.found):
        look.into(results, depth=0, hops=0)
    return look.found


def note_project(root: Path) -> None:
    """List results in a store on which `root` has only a link, so that links of the results are found."""
    store = Path(os.path.realpath(root / STORE))
    results = os.path.realpath(root)
    if str(store.parent) == results:
        return
    note = store / PROJECTS / sha256_text(results)[:16]
    if note.exists():
        return
    try:
        write_text(note, f"{results}\n")
    except (UserError, OSError) as error:
        warn(f"{note}: cannot be written ({error}); who discards trainings of that store does not see {results}")


def _projects_of(root: Path, found: Uses) -> Iterator[Path]:
    """Yield the folders of results with the same store: `root`, the folder around the store, and the listed ones."""
    yield root
    store = Path(os.path.realpath(root / STORE))
    if store.name == STORE and os.path.realpath(root) != str(store.parent):
        yield store.parent
    try:
        notes = sorted((store / PROJECTS).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        found.unknown[store / PROJECTS] = f"it cannot be read ({error.strerror})"
        return
    for note in notes:
        if note.name.startswith("."):  # being written
            continue
        try:
            results = Path(note.read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as error:
            found.unknown[note] = f"it cannot be read ({error})"
            continue
        if results.is_dir():
            yield results
        else:
            found.unknown[results] = f"it is not there, and shares the store; if it is gone for good, delete {note}"


class _Look:
    """One walk through the folders of results."""

    def __init__(self, root: Path) -> None:
        self.found = Uses()
        self.root = os.path.realpath(root)
        self.store = os.path.realpath(root / STORE)
        self.store_inode = _inode(self.store)
        self.seen: set[tuple[int, int, int, bool]] = set()
        for place in _unmounted(self.root):
            self.found.unknown[place] = f"a disk that {MOUNTS} mounts there is not mounted"

    def into(self, folder: Path, depth: int, hops: int, inside_stage: bool = False, is_of_data: bool = False) -> None:
        """Note the links in a folder and below it; `depth` below the results, `hops` links to folders behind.

        `is_of_data`: the folder lies in one named as a run's data, so only a run of the same name has stages there.
        """
        entries = self._entries(folder, depth, inside_stage)
        names = {entry.name for entry in entries}
        is_stage = inside_stage or not names.isdisjoint(OF_STAGE)
        is_data = is_of_data or (depth > 0 and folder.name in WITHOUT_STAGES)
        may_lead_on = depth <= 2 and not is_stage and not is_data
        if "amended.json" in names:
            self._amended(folder / "amended.json")
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith(".") or entry.name == OF_DISK:
                continue
            kind = self._kind(entry, path)
            if kind == "link":
                self._link(path, depth, hops, is_stage, may_lead_on)
            elif kind != "folder" or self._is_store(path):
                continue
            elif is_stage and entry.name in INSIDE:
                self.into(path, depth + 1, hops, inside_stage=True)
            elif not inside_stage and self._may_hold_stages(entry.name, depth, is_stage, is_data):
                self.into(path, depth + 1, hops, is_of_data=is_data)

    def _entries(self, folder: Path, depth: int, inside_stage: bool) -> list[os.DirEntry[str]]:
        """Return the entries of a folder; none for a folder seen before, gone, or unreadable."""
        try:
            state = folder.stat()
            visit = (state.st_dev, state.st_ino, depth, inside_stage)
            if visit in self.seen:
                return []
            with os.scandir(folder) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.found.unknown[folder] = f"it cannot be read ({error.strerror})"
            return []
        self.seen.add(visit)
        return sorted(found, key=lambda entry: entry.name)

    def _kind(self, entry: os.DirEntry[str], path: Path) -> str:
        """Return whether an entry is a link, a folder, or anything else."""
        try:
            if entry.is_symlink():
                return "link"
            return "folder" if entry.is_dir(follow_symlinks=False) else "file"
        except FileNotFoundError:
            return "file"
        except OSError as error:
            self.found.unknown[path] = f"it cannot be read ({error.strerror})"
            return "file"

    @staticmethod
    def _may_hold_stages(name: str, depth: int, is_stage: bool, is_data: bool) -> bool:
        """Whether stages may lie in a folder with a name, inside a folder at a depth."""
        if depth >= STAGES_BELOW:
            return False
        if depth == 0:
            return True
        # A stage without a run may have the name of a run, and its folder then holds that run's stages.
        if is_stage or is_data:
            return depth == 1
        return name not in WITHOUT_STAGES

    def _is_store(self, folder: Path) -> bool:
        return folder.name == STORE and os.path.realpath(folder) == self.store

    def _link(self, link: Path, depth: int, hops: int, is_stage: bool, may_lead_on: bool) -> None:
        """Note the target of a link: in the store, a folder that may hold stages, or unknown."""
        counts = is_stage or may_lead_on
        target = ""
        try:
            target = os.path.realpath(link)
            if target == self.store:
                return
            if inside := self._in_store(target):  # whether or not it is still there
                self.found.add(link, inside)
                return
            target = os.path.realpath(link, strict=True)
            is_folder = os.path.isdir(target)  # noqa: PTH112
        except (FileNotFoundError, NotADirectoryError):
            is_absent = not Path(target).is_relative_to(self.root)
            may_have_led_on = may_lead_on and depth <= 1
            if is_absent and (may_have_led_on or (is_stage and link.name in LINKS)):
                self.found.unknown[link] = (
                    f"it leads to {target}, which is not there; delete it if that is gone for good"
                )
            return
        except OSError as error:
            if counts:
                self.found.unknown[link] = f"where it leads cannot be read ({error.strerror})"
            return
        self.found.add(link, target)
        if not is_folder or not counts:
            return
        if inside := self._under_another_name(target):
            self.found.add(link, inside)
        elif hops >= LINKED_FOLDERS:
            self.found.unknown[link] = "more links to folders one behind the other than are followed"
        elif is_stage and link.name in INSIDE:
            self.into(link, depth + 1, hops + 1, inside_stage=True)
        elif may_lead_on:
            self.into(link, 0, hops + 1)

    def _in_store(self, target: str) -> str | None:
        return target if target.startswith(f"{self.store}{os.sep}") else None

    def _under_another_name(self, target: str) -> str | None:
        """Return the path in the store of a folder reached through a second mount of the disk; else None."""
        if self.store_inode is None:
            return None
        folder = Path(target)
        for parent in folder.parents:
            if _inode(str(parent)) == self.store_inode:
                return str(Path(self.store, folder.relative_to(parent)))
        return None

    def _amended(self, path: Path) -> None:
        """Note the trainings from which a stage is amended to go on, until the stage has taken the steps."""
        try:
            amendments = (read_if_there(path, Amendments) or {"amendments": []})["amendments"]
        except (UserError, OSError) as error:
            self.found.unknown[path] = str(error)
            return
        for each in amendments:
            if TrainingFolder(Path(self.store, each["identity"])).newest_step < each["step"]:
                self.found.add(path, str(Path(self.store, each["from"])))


def _inode(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _unmounted(root: str) -> Iterator[Path]:
    """Yield the mount points below the results without a mounted disk."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) < 2 or fields[0].startswith("#"):
            continue
        place = fields[1].replace("\\040", " ").replace("\\011", "\t")
        if place.startswith(f"{root}{os.sep}") and not os.path.ismount(place):
            yield Path(place)
