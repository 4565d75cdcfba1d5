"""What uses a training: every link that can be reached, and whatever cannot be read."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stage import uses as uses_module
from scripts.stage.removal import trainings, unlinked
from scripts.stage.uses import find_uses, note_project
from tests.conftest import ROOT
from tests.users import ANN, BOB, as_user, can_be_others, share, shared_folder

ONE, OTHER = "0" * 16, "1" * 16
ROOM = Path("results")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two trainings in a store, in a folder beside which other disks and projects have room."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    make_store(ROOM)


def make_store(root: Path, *names: str) -> None:
    """Trainings with a checkpoint and an export."""
    for name in names or (ONE, OTHER):
        training = root / "store" / name
        for folder in ("checkpoints/step_2", "exports/abc"):
            (training / folder).mkdir(parents=True)
            (training / folder / "model.safetensors").write_bytes(b"weights")
        (training / "identity.json").write_text("{}")


def link(place: str | Path, target: str | Path) -> None:
    """Make a link, and the folders around it."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).symlink_to(target)


# --- what counts ---


def of_a_run() -> None:
    link("results/a/sft/run", f"../../store/{ONE}")


def of_a_checkpoint() -> None:
    link("results/a/sft/ckpt/weights", f"../../../store/{ONE}/checkpoints/step_2")


def of_an_export_without_a_run() -> None:
    link("results/sft/hf/model", f"../../store/{ONE}/exports/abc")


def of_an_adapter_in_a_trial() -> None:
    link("results/a/sample-8/sft/hf/adapter", f"../../../../store/{ONE}/exports/abc")


def of_a_quantized_export() -> None:
    link("results/a/sft/quantized/hf/model", f"../../../../store/{ONE}/exports/abc")
    (ROOM / "a/sft/ckpt").mkdir()


def by_an_absolute_name() -> None:
    link("results/a/sft/run", Path(f"results/store/{ONE}").absolute())


def by_a_link_to_a_link() -> None:
    link("results/a/sft/run", "../../others")
    link("results/others", f"store/{ONE}")


def of_a_run_named_as_a_stage() -> None:
    link("results/sft/run", f"../store/{OTHER}")
    link("results/sft/rlvr/run", f"../../store/{ONE}")


def of_a_run_named_data() -> None:
    (ROOM / "data/source").mkdir(parents=True)
    link("results/data/sft/run", f"../../store/{ONE}")


def of_a_run_on_another_disk() -> None:
    link("results/a", "../../disk/a")
    link("../disk/a/sft/run", Path(f"results/store/{ONE}").absolute())


def of_a_stage_on_another_disk() -> None:
    link("results/a/sft", "../../../disk/sft")
    link("../disk/sft/ckpt/weights", Path(f"results/store/{ONE}/checkpoints/step_2").absolute())


def of_a_checkpoint_on_another_disk() -> None:
    link("results/a/sft/ckpt", "../../../../disk/ckpt")
    link("../disk/ckpt/weights", Path(f"results/store/{ONE}/checkpoints/step_2").absolute())


def of_a_farm_of_links_to_stages() -> None:
    link("results/farm/best", "../../../bob/results/r/sft")
    link("../bob/results/r/sft/run", Path(f"results/store/{ONE}").absolute())


def of_another_projects_results() -> None:
    link("results/bob", "../../bob/results")
    link("../bob/results/r/sample-4/sft/run", Path(f"results/store/{ONE}").absolute())


def of_another_projects_results_that_share_the_store() -> None:
    link("../bob/results/store", Path("results/store").absolute())
    note_project(Path("../bob/results"))
    link("../bob/results/r/sft/run", f"../../store/{ONE}")


def behind_a_loop_of_folders() -> None:
    link("results/a/back", "..")
    link("results/z/sft/run", f"../../store/{ONE}")


def by_an_amendment_whose_steps_are_not_taken() -> None:
    amendment = {"for": "f", "from": ONE, "step": 2, "planned": 4, "identity": "2" * 16}
    amendment |= {"because": "a reason", "changed": [], "time": ""}
    (ROOM / "a/sft").mkdir(parents=True)
    (ROOM / "a/sft/amended.json").write_text(json.dumps({"amendments": [amendment]}))


USED = [
    of_a_run,
    of_a_checkpoint,
    of_an_export_without_a_run,
    of_an_adapter_in_a_trial,
    of_a_quantized_export,
    by_an_absolute_name,
    by_a_link_to_a_link,
    of_a_run_named_as_a_stage,
    of_a_run_named_data,
    of_a_run_on_another_disk,
    of_a_stage_on_another_disk,
    of_a_checkpoint_on_another_disk,
    of_a_farm_of_links_to_stages,
    of_another_projects_results,
    of_another_projects_results_that_share_the_store,
    behind_a_loop_of_folders,
    by_an_amendment_whose_steps_are_not_taken,
]


@pytest.mark.parametrize("made", USED, ids=lambda made: made.__name__)
def test_a_link_from_wherever_results_reach_keeps_a_training(made):
    made()
    uses = find_uses(ROOM)
    assert not uses.unknown
    assert uses.of(ROOM / "store" / ONE)
    assert OTHER in str(uses.links) or [path.name for path in unlinked(ROOM)] == [OTHER]


def test_the_store_is_found_by_the_project_that_links_to_it_too():
    link("../bob/results/store", Path("results/store").absolute())
    of_a_run()
    assert [path.name for path in unlinked(Path("../bob/results"))] == [OTHER]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_link_by_another_name_of_the_same_disk_keeps_a_training(tmp_path):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    link("../bob/results/r/sft/run", f"../../../../project/results/store/{ONE}")
    link("results/bob", mounted / "bob/results")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
    program += "from scripts.stage.removal import unlinked\nprint(*(path.name for path in unlinked(Path('results'))))"
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", tmp_path, mounted, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr:
        pytest.skip("may not mount here")
    assert done.stdout.split() == [OTHER], done.stderr


# --- what does not count ---


def by_a_link_to_a_training_that_is_gone() -> None:
    link("results/a/sft/run", "../../store/" + "3" * 16)


def by_an_old_link_within_the_results() -> None:
    link("results/a/sft/hf/model", "../exports/gone")


def by_users_data_that_is_gone() -> None:
    link("results/a/data/source/rows.jsonl", "/nowhere/rows.jsonl")
    link("results/data/source/rows.jsonl", "/nowhere/rows.jsonl")


def by_a_link_to_a_file() -> None:
    Path("README").write_text("")
    link("results/README", "../README")


def by_the_folder_of_a_disk() -> None:
    link("results/lost+found/sft/run", f"../../store/{ONE}")


def by_an_amendment_whose_steps_are_taken() -> None:
    by_an_amendment_whose_steps_are_not_taken()
    make_store(ROOM, "2" * 16)
    (ROOM / "store" / ("2" * 16) / "checkpoints/step_2/files.json").write_text("{}")


@pytest.mark.parametrize(
    "made",
    [
        by_a_link_to_a_training_that_is_gone,
        by_an_old_link_within_the_results,
        by_users_data_that_is_gone,
        by_a_link_to_a_file,
        by_the_folder_of_a_disk,
        by_an_amendment_whose_steps_are_taken,
    ],
    ids=lambda made: made.__name__,
)
def test_what_uses_no_training_keeps_none(made):
    made()
    uses = find_uses(ROOM)
    assert not uses.unknown
    assert {ONE, OTHER} <= {path.name for path in unlinked(ROOM)}


# --- what is unknown ---


def a_loop() -> str:
    link("results/a", "a")
    return "results/a may use it: where it leads cannot be read (Too many levels of symbolic links)"


def a_loop_in_a_stage() -> str:
    of_a_run()
    link("results/a/sft/ckpt/weights", "weights")
    return "weights may use it: where it leads cannot be read"


def a_disk_that_is_not_there() -> str:
    link("results/a", "/nowhere/results/a")
    return "results/a may use it: it leads to /nowhere/results/a, which is not there"


def a_store_that_is_not_there() -> str:
    link("results/a/sft/run", f"/nowhere/results/store/{ONE}")
    return "run may use it: it leads to /nowhere"


def an_amendment_that_is_damaged() -> str:
    (ROOM / "a/sft").mkdir(parents=True)
    (ROOM / "a/sft/amended.json").write_text("{")
    return "amended.json may use it: "


def a_project_that_is_not_there() -> str:
    link("../bob/results/store", Path("results/store").absolute())
    note_project(Path("../bob/results"))
    Path("../bob").rename("../carol")
    return "bob/results may use it: it is not there, and shares the store"


def too_many_links() -> str:
    for number in range(6):
        link(f"../farm{number}/next", Path(f"../farm{number + 1}").absolute())
        Path(f"../farm{number + 1}").mkdir(exist_ok=True)
    link("results/farm", Path("../farm0").absolute())
    return "may use it: more links to folders"


@pytest.mark.parametrize(
    "made",
    [
        a_loop,
        a_loop_in_a_stage,
        a_disk_that_is_not_there,
        a_store_that_is_not_there,
        an_amendment_that_is_damaged,
        a_project_that_is_not_there,
        too_many_links,
    ],
    ids=lambda made: made.__name__,
)
def test_what_cannot_be_read_keeps_every_training(made):
    why = made()
    uses = find_uses(ROOM)
    assert why in uses.words_of_unknown()
    assert unlinked(ROOM) == [] and len(trainings(ROOM)) == 2


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ELOOP, errno.ENOTCONN, errno.ETIMEDOUT]
)
@pytest.mark.parametrize("call", ["scandir", "stat", "lstat", "readlink"])
def test_an_error_of_the_file_server_keeps_every_training(number, call, monkeypatch):
    """The call fails for one folder or link, as strace makes it fail in benchmarks/discarding.py."""
    of_a_run()
    of_a_checkpoint()
    assert [path.name for path in unlinked(ROOM)] == [OTHER]
    really = getattr(os, call)
    broken = "ckpt" if call in ("scandir", "stat") else "run"

    def failing(path, *arguments, **options):
        if Path(path).name == broken:
            raise OSError(number, os.strerror(number), os.fspath(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, call, failing)
    assert unlinked(ROOM) == []
    assert os.strerror(number) in find_uses(ROOM).words_of_unknown()


def test_a_disk_that_the_machine_mounts_below_the_results_must_be_mounted(tmp_path, monkeypatch):
    (ROOM / "of bob").mkdir()
    table = tmp_path / "fstab"
    table.write_text(f"# disks\nUUID=0 / ext4 defaults 0 1\nserver:/bob {ROOM.absolute()}/of\\040bob nfs ro 0 0\n")
    monkeypatch.setattr(uses_module, "MOUNTS", table)
    assert "of bob may use it: a disk that" in find_uses(ROOM).words_of_unknown()
    assert unlinked(ROOM) == []


COUNT = """
from pathlib import Path
from scripts.stage.removal import trainings, unlinked
from scripts.stage.uses import find_uses
for root in sorted(Path(sys.argv[1]).iterdir()):
    print(root.name, len(trainings(root)), len(unlinked(root)), len(find_uses(root).unknown) > 0)
"""
CLOSED = {
    f"{place.replace('/', '.')} {mode:03o}": (place, mode)
    for place in ("bob", "bob/sft", "bob/sft/ckpt", "bob/sample-2")
    for mode in (0o700, 0o711, 0o000)
}


@pytest.mark.skipif(not can_be_others(), reason="only root can be another user")
def test_links_in_a_colleagues_closed_folder_keep_every_training():
    names = [f"{number:016x}" for number in range(7)]
    with shared_folder() as folder:
        for case, (closed, _) in CLOSED.items():
            root = folder / case
            make_store(root, *names)
            run = root / ("bob/sample-2" if closed == "bob/sample-2" else "bob")
            for number, name in enumerate(names):
                ckpt = run / f"sft{number or ''}" / "ckpt"
                link(ckpt / "weights", os.path.relpath(root / "store" / name / "checkpoints/step_2", ckpt))
        share(folder)
        for case, (closed, mode) in CLOSED.items():
            bobs = folder / case / "bob"
            for path in [bobs, *bobs.rglob("*")]:
                os.chown(path, BOB, BOB, follow_symlinks=False)
            (folder / case / closed).chmod(mode)
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{COUNT}"
        command = as_user(ANN, sys.executable, "-c", program, str(folder))
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"{case} 7 0 True" for case in sorted(CLOSED)]


def test_many_runs_are_looked_through_in_a_moment():
    for number in range(500):
        stage = ROOM / f"r{number // 10}/s{number % 10}"
        for name in ("ckpt", "hf", "logs", "quantized/hf"):
            (stage / name).mkdir(parents=True)
        link(stage / "run", f"../../store/{number + 2:016x}")
        link(stage / "ckpt/weights", f"../../../store/{number + 2:016x}/checkpoints/step_1")
    began = os.times().user + os.times().system
    assert len(find_uses(ROOM).links) > 500
    assert os.times().user + os.times().system - began < 2
