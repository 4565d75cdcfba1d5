"""A training is removed whole or not at all, never while something uses it, and a kill loses and leaves nothing."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts.commands.discard import discarded
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.recipe.stage_settings import Checkpointing
from scripts.stage import owner, removal, store, uses
from scripts.stage.owner import DISCARDS, hold, is_alive, read_owner
from scripts.stage.removal import await_discards, discard, finish_discards, take_back, trainings, unlinked
from scripts.stage.store import finish_removals, prune_checkpoints
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT
from tests.killing import killed_at
from tests.users import ANN, BOB, EVE, as_user, can_be_others, share, shared_folder

ROOM = Path("results")
ONE, OTHER = ROOM / "store" / ("0" * 16), ROOM / "store" / ("1" * 16)
as_root = pytest.mark.skipif(not can_be_others(), reason="only root can be another user")


def fill(folder: Path, steps: tuple[int, ...] = (2, 4)) -> None:
    """A training with checkpoints and an export."""
    for step in steps:
        saved = folder / "saving" / str(step)
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(b"weights" * step)
        TrainingFolder(folder).seal(saved, step)
    (folder / "exports/abc").mkdir(parents=True)
    (folder / "exports/abc/model.safetensors").write_bytes(b"weights" * 1000)
    write_json(folder / "identity.json", {"identity": folder.name})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (ONE, OTHER):
        fill(folder)
    publish(OTHER, "a")


def publish(folder: Path, run: str, step: int = 4) -> None:
    """Link a stage of a run to a training."""
    stage = ROOM / run / "sft"
    (stage / "ckpt").mkdir(parents=True)
    (stage / "run").symlink_to(f"../../store/{folder.name}")
    (stage / "ckpt/weights").symlink_to(f"../../../store/{folder.name}/checkpoints/step_{step}")


def is_whole(folder: Path) -> bool:
    found = TrainingFolder(folder).checkpoints
    is_exported = (folder / "exports/abc/model.safetensors").is_file()
    return [each.step for each in found] == [2, 4] and is_exported and not any(it.damage() for it in found)


def hidden() -> list[str]:
    return [path.name for path in (ROOM / "store").iterdir() if path.name.startswith(".")]


def at_look(number: int, deed, monkeypatch) -> None:
    """Do something right after the look for links with this number, as another process may."""
    looks = []

    def look(root: Path) -> uses.Uses:
        found = uses.find_uses(root)
        looks.append(root)
        if len(looks) == number:
            deed()
        return found

    monkeypatch.setattr(removal, "find_uses", look)
    monkeypatch.setattr(store, "find_uses", look)


# --- what is said ---


def test_each_training_gets_a_line_and_what_is_freed_is_counted():
    results = {each.folder: each for each in discarded(ROOM, [], is_dry=True)}
    assert results[OTHER].stays == "results/a/sft/ckpt/weights leads to it, and 1 more" and is_whole(ONE)
    assert results[ONE].freed > 7000
    really = {each.folder: each for each in discarded(ROOM, [], is_dry=False)}
    assert really == results and not ONE.exists() and is_whole(OTHER) and hidden() == []


def test_a_training_may_be_named_by_a_link_and_no_other_folder_may(tmp_path):
    (result,) = discarded(ROOM, [Path("results/a/sft/run")], is_dry=False)
    assert result.stays and is_whole(OTHER)
    for path in (ROOM, ROOM / "store", ROOM / "a", tmp_path, ONE / "exports"):
        with pytest.raises(UserError, match="no training below results"):
            list(discarded(ROOM, [path], is_dry=False))
    (result,) = discarded(ROOM, [ONE], is_dry=False)
    assert result.freed and trainings(ROOM) == [OTHER]


COMMAND = (
    "from scripts.commands.__main__ import main\nsys.argv = ['stagecoach', 'discard', *sys.argv[1:]]\nrun_program(main)"
)


def stagecoach_discard(user: int | None, *arguments: str) -> tuple[int, str]:
    """The exit status and the output of `stagecoach discard`, by a user."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.errors import run_program\n{COMMAND}"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        as_user(user, *command) if user else command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@as_root
def test_others_trainings_stay_unless_named_and_those_that_one_may_not_remove_stay_whole():
    with shared_folder() as folder:
        (folder / "config").mkdir()
        (folder / "config/config.yaml").write_text(f"recipe: {ROOT}/config/recipes/tiny.yaml\nsite: laptop\n")
        root = folder / "results"
        shutil.copytree(ROOM, root, symlinks=True)
        share(folder)
        os.chdir(folder)
        status, said = stagecoach_discard(BOB)
        assert status == 0 and f"nothing leads to it, but it is user {ANN}'s; name it to remove it" in said, said
        (root / "store" / ONE.name / "exports").chmod(0o755)
        status, said = stagecoach_discard(BOB, str(root / "store" / ONE.name))
        assert (status, is_whole(root / "store" / ONE.name)) == (1, True)
        assert f"exports is user {ANN}'s, of mode 0755, and you may not remove what is in it" in said, said
        status, said = stagecoach_discard(EVE, str(root / "store" / ONE.name))
        assert (status, is_whole(root / "store" / ONE.name)) == (1, True), said
        (root / "store" / ONE.name / "exports").chmod(0o2775)
        (root / "store").chmod(0o3775)
        status, said = stagecoach_discard(BOB, str(root / "store" / ONE.name))
        assert (status, is_whole(root / "store" / ONE.name)) == (1, True) and "(mode +t)" in said, said
        (root / "store").chmod(0o2775)
        status, said = stagecoach_discard(BOB, str(root / "store" / ONE.name))
        assert status == 0 and " freed" in said and not (root / "store" / ONE.name).exists(), said
        (root / "b").mkdir(mode=0o700)
        status, said = stagecoach_discard(ANN)
        assert status == 0 and "leads to it" in said and "b: it cannot be read (Permission denied)" in said, said


def test_a_training_with_a_disk_of_its_own_stays_whole(monkeypatch):
    disk = type("Disk", (), {"mountpoint": str((ONE / "exports").resolve())})
    monkeypatch.setattr(removal.psutil, "disk_partitions", lambda all: [disk])
    with pytest.raises(UserError, match="exports is a disk of its own; unmount it first"):
        discard(ONE, ROOM)
    assert is_whole(ONE)


# --- who is at work ---


def test_what_a_process_trains_or_exports_stays():
    for lock in (ONE / "owner.json", ONE / "exports/owner.json"):
        with hold(lock), pytest.raises(UserError, match="stays: process"):
            discard(ONE, ROOM)
        assert is_whole(ONE)
    discard(ONE, ROOM)
    assert hidden() == []


def test_a_link_made_between_the_look_and_the_renaming_brings_the_training_back(monkeypatch):
    at_look(1, lambda: publish(ONE, "b"), monkeypatch)
    with pytest.raises(UserError, match="b/sft/ckpt/weights leads to it"):
        discard(ONE, ROOM)
    assert is_whole(ONE) and hidden() == [] and not (ONE / "owner.json").exists()


def test_a_lock_that_is_taken_over_while_the_process_stands_still_stops_it(monkeypatch):
    def take_over() -> None:
        (ONE / "owner.json").write_text('{"host": "elsewhere", "pid": 1, "since": 0, "token": "another"}')

    at_look(1, take_over, monkeypatch)
    with pytest.raises(UserError, match="its lock was taken over while this process stood still"):
        discard(ONE, ROOM)
    assert is_whole(ONE) and hidden() == []
    assert read_owner(ONE / "owner.json")["host"] == "elsewhere"


def test_a_lock_that_is_taken_over_as_the_folder_is_renamed_brings_it_back(monkeypatch):
    really = owner.Held.is_in

    def taken_over_at_once(lock: owner.Held, file: Path) -> bool:
        is_ours = really(lock, file)
        file.write_text('{"host": "elsewhere", "pid": 1, "since": 0, "token": "another"}')
        return is_ours

    monkeypatch.setattr(owner.Held, "is_in", taken_over_at_once)
    with pytest.raises(UserError, match="its lock was taken over"):
        discard(ONE, ROOM)
    assert is_whole(ONE) and hidden() == []


def test_who_waits_for_the_lock_begins_anew_in_a_whole_folder():
    begun = threading.Event()

    def train() -> None:
        begun.set()
        with hold(ONE / "owner.json", timeout=60):
            write_json(ONE / "identity.json", {"identity": ONE.name})

    trains = threading.Thread(target=train)

    def look(root: Path) -> uses.Uses:
        if not trains.is_alive():
            trains.start()
            begun.wait()
            time.sleep(0.2)
        return uses.find_uses(root)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(removal, "find_uses", look)
        assert discard(ONE, ROOM) > 0
    trains.join(60)
    assert [path.name for path in ONE.iterdir()] == ["identity.json"] and hidden() == []


def test_where_another_began_anew_meanwhile_and_it_turns_out_to_be_in_use_both_are_kept(monkeypatch):
    at_look(1, lambda: publish(ONE, "b"), monkeypatch)
    really = removal._rename_away

    def rename_away(*arguments):
        reason = really(*arguments)
        fill(ONE, (4,))
        return reason

    monkeypatch.setattr(removal, "_rename_away", rename_away)
    with pytest.raises(UserError, match=rf"begun anew meanwhile, what was there is now .*{ONE.name}\.1"):
        discard(ONE, ROOM)
    assert is_whole(ONE.with_name(f"{ONE.name}.1")) and hidden() == []


def test_of_many_that_discard_at_once_each_frees_what_is_left_and_nobody_fails(tmp_path):
    for number in range(2, 12):
        fill(ROOM / "store" / f"{number:016x}")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
    program += "from scripts.stage.removal import discard_all, trainings\n"
    program += "results = [*discard_all(trainings(Path('results')), Path('results'))]\n"
    program += "print(sum(each.freed > 0 for each in results), sum(each.is_trouble for each in results))"
    command = [sys.executable, "-c", program]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [caller.communicate(timeout=120)[0].split() for caller in callers]
    assert sum(int(freed) for freed, _ in said) <= 11 and {trouble for _, trouble in said} == {"0"}
    list(discarded(ROOM, [], is_dry=False))
    assert trainings(ROOM) == [OTHER] and hidden() == [] and is_whole(OTHER)


def test_who_may_not_write_there_links_first_and_waits_for_who_discards(monkeypatch):
    with hold(ONE / "owner.json", purpose=DISCARDS):
        waits = threading.Thread(target=await_discards, args=(ONE,))
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()
    waits.join(60)
    assert not waits.is_alive()
    discard(ONE, ROOM)
    with pytest.raises(CutOffError, match="was discarded just now"):
        await_discards(ONE)
    with hold(OTHER / "owner.json"):
        await_discards(OTHER)


# --- a removal that takes long, and one that is cut off ---

SLOW = """
import sys, time; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from scripts.stage import owner, removal
owner.HEARTBEAT_SECONDS = 0.05
really = removal.shutil.rmtree
def slowly(*arguments, **options):
    print("removes", flush=True)
    time.sleep(float(sys.argv[2]))
    return really(*arguments, **options)
removal.shutil.rmtree = slowly
print("freed", removal.discard(Path("results/store/0000000000000000"), Path("results")) > 0)
"""


def test_a_removal_that_lasts_longer_than_the_heartbeat_ends_well():
    done = subprocess.run([sys.executable, "-c", SLOW, str(ROOT), "1"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["removes", "freed", "True"] and hidden() == [] and not ONE.exists()


def test_a_removal_that_was_killed_is_gone_on_with_by_the_next_call():
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(ROOT), "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "removes\n"
    process.kill()
    process.wait()
    assert not ONE.exists() and len(hidden()) == 1
    (result,) = finish_discards(ROOM)
    assert result.folder == ONE and result.freed > 7000 and hidden() == []


def test_what_an_earlier_commit_left_half_removed_is_removed():
    ONE.rename(ONE.with_name(f".{ONE.name}.removing"))
    (result,) = finish_discards(ROOM)
    assert result.folder == ONE and hidden() == []


def leave_undecided() -> Path:
    away = ONE.with_name(f".{ONE.name}.{'a' * 16}.leaving")
    ONE.rename(away)
    return away


def test_what_was_renamed_and_not_doomed_comes_back_where_it_is_used_and_goes_where_not():
    away = leave_undecided()
    publish(ONE, "b")
    (result,) = finish_discards(ROOM)
    assert "brought back as results/store/0000000000000000, for results/b/sft/" in result.stays
    assert is_whole(ONE) and not away.exists()
    shutil.rmtree(ROOM / "b")
    leave_undecided()
    (result,) = finish_discards(ROOM)
    assert result.freed and not ONE.exists() and hidden() == []


def test_who_opens_a_training_that_was_renamed_and_not_doomed_has_it_back():
    away = leave_undecided()
    with hold(away / "owner.json", purpose=DISCARDS):
        take_back(ONE)
        assert away.exists(), "its process lives, and decides"
    take_back(OTHER)
    assert away.exists()
    take_back(ONE)
    assert is_whole(ONE) and hidden() == []


@pytest.mark.slow
@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_kill_at_any_moment_leaves_all_or_nothing_and_the_next_call_ends_it(is_wanted):
    """Wanted: somebody without rights links to it after the first look; then it is there in the end, and whole."""
    shutil.copytree("results", "before", symlinks=True)

    def deed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if is_wanted:
                at_look(1, lambda: publish(ONE, "b"), patch)
            list(discarded(ROOM, [ONE], is_dry=False))

    for call in range(1, 200):
        status = killed_at(call, deed)
        assert is_whole(ONE) if ONE.exists() else True
        assert is_whole(OTHER)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        was_linked = (ROOM / "b/sft/run").is_symlink()
        list(finish_discards(ROOM))
        if was_linked:
            assert is_whole(ONE), call
        elif ONE.exists():
            discard(ONE, ROOM)
        assert hidden() == [] and not [*(ROOM / "store").rglob("*.tmp")]
        shutil.rmtree("results")
        shutil.copytree("before", "results", symlinks=True)
    assert call > 8


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_on_a_full_disk_there_is_room_for_no_lock_and_a_training_goes_all_the_same(tmp_path):
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
    program += "from scripts.stage.removal import discard; print(discard(Path(sys.argv[1]), Path('results')) > 0)"
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && cp -a results "$1" && cd "$1" && head -c 2m /dev/zero > full; '
    script += 'touch results/one 2>&- && echo x 2>&- > results/one; exec "$2" -c "$3" "$4"'
    (tmp_path / "disk").mkdir()
    command = ["unshare", "--mount", "sh", "-c", script, "sh", tmp_path / "disk", sys.executable, program, ONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr:
        pytest.skip("may not mount here")
    assert "No space left" in done.stderr and done.stdout == "True\n", done.stderr


# --- checkpoints of a training that goes on ---

LAST = Checkpointing(keep_last_k=1)


def test_no_checkpoint_goes_while_it_is_unknown_who_published_it(capsys):
    (ROOM / "loop").symlink_to("loop")
    assert prune_checkpoints(TrainingFolder(ONE), LAST) == [] and is_whole(ONE)
    assert "no checkpoint is removed: results/loop may use it" in capsys.readouterr().err
    (ROOM / "loop").unlink()
    assert prune_checkpoints(TrainingFolder(ONE), LAST) == [2]


def test_a_checkpoint_that_is_published_as_it_goes_comes_back(monkeypatch):
    at_look(1, lambda: publish(ONE, "b", step=2), monkeypatch)
    assert prune_checkpoints(TrainingFolder(ONE), LAST) == [] and is_whole(ONE)


def test_a_checkpoint_that_a_killed_process_was_removing_comes_back_where_it_is_published():
    going = ONE / "checkpoints/removing_step_2"
    publish(ONE, "b", step=2)
    (ONE / "checkpoints/step_2").rename(going)
    finish_removals(TrainingFolder(ONE))
    assert is_whole(ONE) and not going.exists()
    shutil.rmtree(ROOM / "b")
    (ONE / "checkpoints/step_2").rename(going)
    finish_removals(TrainingFolder(ONE))
    assert [each.step for each in TrainingFolder(ONE).checkpoints] == [4] and not going.exists()
    assert not is_alive(ONE / "owner.json") and unlinked(ROOM) == [ONE]
