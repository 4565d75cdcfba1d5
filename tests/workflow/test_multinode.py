"""A stage trained on two nodes: the same rows a step, the same resuming, one voice; and on a real Ray cluster."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import psutil
import pytest

torch = pytest.importorskip("torch")
ray = pytest.importorskip("ray")

from safetensors.torch import load_file  # noqa: E402

from scripts.backends.protocol import write_job  # noqa: E402
from scripts.backends.trl.algorithm import Dtensor  # noqa: E402
from scripts.backends.trl.cluster import in_processes, raise_outcome, train_apart  # noqa: E402
from scripts.backends.trl.train import train_rank as train  # noqa: E402
from scripts.errors import CutOffError  # noqa: E402
from scripts.recipe.resolve import training_config  # noqa: E402
from scripts.recipe.stage_settings import Checkpointing  # noqa: E402
from scripts.stage.rundir import Checkpoint  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.stages import Stages, checkpoint, logged, weights_hash  # noqa: E402

pytestmark = pytest.mark.long

SFT_STEPS = 26  # the 380 rows end within step 24
SFT_STOP, GRPO_STEPS, GRPO_STOP = 25, 6, 2
MPO_STEPS, MPO_STOP = 8, 2  # the 50 pairs fill 6 batches; the 2 left over are dropped
SHARES_STEPS, SHARES_STOP = 4, 2


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def with_reference(job):
    """The job, whose loss looks back to the parent, and which computes nothing for padding."""
    values = job.config.values()
    values["policy"] |= {"skip_padding": True}
    values["loss_fn"] |= {"reference_policy_kl_penalty": 0.05}
    return replace(job, config=training_config(values))


def in_shares(job, run):
    """The job in another run directory, where each process holds a share of the weights."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    policy = job.settings.policy.model_copy(update={"dtensor_cfg": Dtensor(enabled=True)})
    return replace(job, run=run, settings=job.settings.model_copy(update={"policy": policy}))


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """SFT, GRPO and MPO trained by one process; then by two ranks, straight and in parts, with copies and shares."""
    where = tmp_path_factory.mktemp("multinode")
    pairs = Stages(where, ROOT / "tests/algorithms.yaml")
    made = Stages(where)  # after it: blend sft is this recipe's
    train(made.job("sft", "sft.alone", SFT_STEPS))
    made.parent = {"parent_model": checkpoint(where / "sft.alone", SFT_STEPS)}
    train(made.job("rlvr1", "grpo.alone", GRPO_STEPS, **made.parent))
    train(pairs.job("mpo", "mpo.alone", MPO_STEPS, **made.parent))
    plan = []

    def add(job, stop=None):
        file = where / f"{len(plan)}.json"
        write_job(file, job)
        plan.append([str(file), stop])

    for source, stage, name, steps, stop, options in (
        (made, "sft", "sft", SFT_STEPS, SFT_STOP, {}),
        (made, "rlvr1", "grpo", GRPO_STEPS, GRPO_STOP, made.parent),
        (pairs, "mpo", "mpo", MPO_STEPS, MPO_STOP, made.parent),
    ):
        add(source.job(stage, f"{name}.two", steps, nodes=2, **options))
        resumed = source.job(stage, f"{name}.resumed", steps, nodes=2, **options)
        if name == "mpo":
            add(replace(resumed, max_num_steps=stop))
        else:
            add(resumed, stop)
        stopped = checkpoint(where / f"{name}.resumed", stop)
        add(replace(resumed, resume_from=stopped))
        if name != "mpo":
            alone = checkpoint(where / f"{name}.alone", steps)
            add(source.job(stage, f"{name}.grown", steps + 1, nodes=2, resume_from=alone, **options))
    plain = [made.job("sft", "sft.copies", SHARES_STEPS, nodes=2)]
    plain.append(with_reference(made.job("rlvr1", "rlvr1.copies", SHARES_STEPS, nodes=2, **made.parent)))
    for job in plain:
        add(job)
    for job in plain:
        shares = in_shares(job, where / f"{job.stage}.shares")
        add(shares)
        resumed = in_shares(job, where / f"{job.stage}.shares.resumed")
        add(replace(resumed, max_num_steps=SHARES_STOP))
        add(replace(resumed, resume_from=checkpoint(resumed.run, SHARES_STOP)))
    train(made.job("sft", "sft.half", SHARES_STOP))
    add(
        replace(
            in_shares(plain[0], where / "sft.shares.grown"), resume_from=checkpoint(where / "sft.half", SHARES_STOP)
        )
    )
    (where / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "tests.ranks", where / "plan.json"]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*command, str(rank), port], cwd=ROOT, text=True, stdout=subprocess.PIPE) for rank in (0, 1)
    ]
    made.said = [rank.communicate(timeout=1200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return made


@pytest.mark.parametrize(("name", "steps"), [("sft", SFT_STEPS), ("mpo", MPO_STEPS)])
def test_two_ranks_learn_what_one_process_learns(stages, name, steps):
    alone, two = (logged(stages.directory / f"{name}.{run}") for run in ("alone", "two"))
    assert [step["step"] for step in two] == list(range(1, steps + 1))
    for one, other in zip(alone, two, strict=True):
        for key in ("loss", "grad_norm", "entropy", "lr"):
            assert other[key] == pytest.approx(one[key], rel=1e-3), f"{key} of step {one['step']}"
    first, second = (
        load_file(checkpoint(stages.directory / f"{name}.{run}", steps) / "model.safetensors")
        for run in ("alone", "two")
    )
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)


def test_both_ranks_together_reward_each_steps_prompts_as_whole_groups(stages):
    rows = [json.loads(line) for line in stages.split("rlvr1").read_text().splitlines()]
    entries = logged(stages.directory / "grpo.two")
    halves = [
        [json.loads(line) for line in (stages.directory / f"grpo.two/rewarded.{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    uneven = 0
    for number, entry in enumerate(entries):
        mine = [half[2 * number : 2 * number + 2] for half in halves]
        groups = mine[0] + mine[1]
        assert [row for row, _ in groups] == rows[4 * number : 4 * number + 4]
        assert {size for _, size in groups} == {4}
        names = [[row["agent_ref"]["name"] for row, _ in half] for half in mine]
        uneven += sorted(names[0]) != sorted(names[1])
        shares = [entry["environment_rewards"][name] for name in names[0] + names[1]]
        assert sum(shares) / 4 == pytest.approx(entry["reward_mean"], abs=1e-6)
    assert uneven and len(entries) == GRPO_STEPS


@pytest.mark.parametrize(("name", "steps"), [("sft", SFT_STEPS), ("grpo", GRPO_STEPS), ("mpo", MPO_STEPS)])
def test_two_ranks_that_were_interrupted_or_train_in_parts_end_with_the_same_bits(stages, name, steps):
    straight, resumed = stages.directory / f"{name}.two", stages.directory / f"{name}.resumed"
    assert weights_hash(resumed, steps) == weights_hash(straight, steps)
    assert [step["step"] for step in logged(resumed)] == list(range(1, steps + 1))
    assert weights_hash(straight, steps) != weights_hash(stages.directory / f"{name}.alone", steps)


@pytest.mark.parametrize("stage", ["sft", "rlvr1"])
def test_ranks_with_shares_learn_what_ranks_with_copies_learn_and_resume_to_the_same_bits(stages, stage):
    copies, shares = (stages.directory / f"{stage}.{run}" for run in ("copies", "shares"))
    (first, whole), (second, _) = (json.loads((shares / f"held.{rank}.json").read_text()) for rank in (0, 1))
    assert first + second == whole and first < 0.6 * whole
    for one, other in zip(logged(copies), logged(shares), strict=True):
        for key in {"loss", "grad_norm", "reward_mean", "kl"} & one.keys():
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), f"{key} of step {one['step']}"
    assert weights_hash(shares, SHARES_STEPS) == weights_hash(shares.with_name(f"{stage}.shares.resumed"), SHARES_STEPS)


def test_a_run_goes_on_with_shares_instead_of_copies_and_back(stages):
    straight = logged(stages.directory / "sft.copies")
    job = stages.job("sft", "sft.shrunk", SHARES_STEPS)
    train(replace(job, resume_from=checkpoint(stages.directory / "sft.shares.resumed", SHARES_STOP)))
    for run in ("sft.shares.grown", "sft.shrunk"):
        for one, other in zip(straight[SHARES_STOP:], logged(stages.directory / run), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-3), f"step {one['step']} of {run}"


def test_a_checkpoint_of_two_ranks_is_sealed_with_both_their_random_states_and_only_one_rank_speaks(stages):
    saved = checkpoint(stages.directory / "grpo.two", GRPO_STEPS)
    listed = json.loads((saved / "files.json").read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth"} < set(listed) and Checkpoint.at(saved).damage() is None
    assert f"rlvr1: step {GRPO_STEPS}/{GRPO_STEPS}, reward " in stages.said[0] and stages.said[1] == ""
    assert sorted(path.name for path in (stages.directory / "sft.two").iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_a_run_goes_on_with_another_number_of_nodes(stages):
    assert logged(stages.directory / "sft.grown")[0]["step"] == SFT_STEPS + 1
    assert logged(stages.directory / "grpo.grown")[0]["step"] == GRPO_STEPS + 1
    two = checkpoint(stages.directory / "grpo.resumed", GRPO_STOP)
    for run in ("grpo.shrunk", "grpo.shrunk.again"):
        train(stages.job("rlvr1", run, GRPO_STOP + 2, resume_from=two, **stages.parent))
    hashes = {weights_hash(stages.directory / run, GRPO_STOP + 2) for run in ("grpo.shrunk", "grpo.shrunk.again")}
    assert len(hashes) == 1


# --- in processes of this node ---


def ranks_below(process: psutil.Process) -> dict[str, psutil.Process]:
    """The processes that torchrun made ranks, by their numbers."""
    return {child.environ()["RANK"]: child for child in process.children(True) if "RANK" in child.environ()}


def test_a_killed_process_is_named_and_what_goes_on_from_its_checkpoint_saves_its_step_when_asked_to_stop(stages):
    saving = {"checkpointing": Checkpointing(save_period=2)}
    job = replace(stages.job("sft", "sft.killed", 100_000, settings=saving), processes=2)

    def once_saved(after: int, deed) -> None:
        wait_until("a checkpoint", lambda: job.training.newest_step > after, seconds=900)
        deed()

    def kill_rank_1() -> None:
        ranks_below(psutil.Process())["1"].kill()

    kill = Thread(target=once_saved, args=(0, kill_rank_1))
    kill.start()
    with pytest.raises(CutOffError, match=r"^rank 1 was killed \(SIGKILL\), by somebody or by the system"):
        train_apart(job, partial(in_processes, job))
    kill.join()
    newest = job.training.newest_checkpoint()
    job = replace(job, resume_from=newest.path)
    stop = Thread(target=once_saved, args=(newest.step, partial(job.stop.ask, "SIGTERM")))
    stop.start()
    train_apart(job, partial(in_processes, job))
    stop.join()
    assert job.stop.reason == "SIGTERM" and job.training.newest_step == logged(job.run)[-1]["step"] > newest.step
    assert sorted(path.name for path in job.run.iterdir()) == ["checkpoints", "metrics.jsonl"]


# --- on Ray ---


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two nodes, both on this machine."""
    ip, port = ray.util.get_node_ip_address(), free_port()
    address = f"{ip}:{port}"
    no_token = pytest.MonkeyPatch()
    no_token.setenv("RAY_AUTH_MODE", "disabled")  # else one in the home, of another cluster, is asked for
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    start = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=2", f"--node-ip-address={ip}"]
    start += ["--object-store-memory=100000000"]
    folder = Path(tempfile.mkdtemp())  # a short path: a socket's has room for 107 bytes
    nodes = []
    try:
        for options in (["--head", f"--port={port}", "--include-dashboard=false"], [f"--address={address}"]):
            if options[0] == "--head":
                options.append(f"--temp-dir={folder}")
            with (folder / f"{len(nodes)}.log").open("w") as log:
                nodes.append(subprocess.Popen([*start, *options], env=environment, stdout=log, stderr=log))
            wait_until(f"node {len(nodes)} of Ray", lambda: nodes_up(address) == len(nodes))
        yield Cluster(address, nodes)
    finally:
        running = Cluster(address, nodes).processes()
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            running = psutil.wait_procs(running, timeout=3)[1]
        psutil.wait_procs(running, timeout=10)
        for node in nodes:
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)
        no_token.undo()


class Cluster:
    """Where the cluster is, and what runs in it."""

    def __init__(self, address: str, nodes: list[subprocess.Popen]) -> None:
        self.address, self.nodes = address, [psutil.Process(node.pid) for node in nodes]

    def processes(self) -> list[psutil.Process]:
        return [*self.nodes, *(child for node in self.nodes for child in node.children(recursive=True))]


def nodes_up(address: str) -> int:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return 0
    gcs = ray._raylet.GcsClient(address=address)
    return sum(node.state == 0 for node in gcs.get_all_node_info().values())


def wait_until(what: str, happens, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)


class Driver:
    """Runs the driver as `ray symmetric-run` does; what the first rank printed is in `said`."""

    def __init__(self, cluster: Cluster, meanwhile=lambda: None) -> None:
        self.address, self.meanwhile = cluster.address, meanwhile

    def __call__(self, place: Path) -> None:
        command = [sys.executable, "-m", "scripts.backends.trl.driver", place / "job.pickle"]
        environment = os.environ | {"RAY_ADDRESS": self.address}
        with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
            try:
                self.meanwhile()
                process.wait(timeout=900)
            except BaseException:
                process.kill()
                raise
        self.said = (place / "output").read_text() if (place / "output").exists() else ""
        raise_outcome(place, place)


def test_ray_trains_the_same_weights_and_says_no_more_than_one_process(stages, cluster):
    driver = Driver(cluster)
    job = stages.job("rlvr1", "grpo.ray", GRPO_STEPS, nodes=2, **stages.parent)
    (job.run / "cluster.0ld").mkdir()
    train_apart(job, driver)
    assert weights_hash(job.run, GRPO_STEPS) == weights_hash(stages.directory / "grpo.two", GRPO_STEPS)
    lines = driver.said.splitlines()
    assert len(lines) == GRPO_STEPS and all(line.startswith("rlvr1: step ") for line in lines), driver.said
    assert sorted(path.name for path in job.run.iterdir()) == ["checkpoints", "metrics.jsonl"]
    assert job.stop.reason is None


def test_two_processes_on_each_of_two_nodes_save_their_step_when_asked_to_stop(stages, cluster):
    job = replace(stages.job("sft", "sft.ray", 100_000, nodes=2), processes=2)
    log = job.run / "metrics.jsonl"

    def ask():
        wait_until("a step", log.exists, seconds=900)
        job.stop.ask("SIGTERM")

    driver = Driver(cluster, ask)
    train_apart(job, driver)
    (saved,) = (job.run / "checkpoints").iterdir()
    assert job.stop.reason == "SIGTERM" and int(saved.name.removeprefix("step_")) == logged(job.run)[-1]["step"]
    assert len(list(saved.glob("rng_state_*.pth"))) == 4
    assert sorted(path.name for path in job.run.iterdir()) == ["checkpoints", "metrics.jsonl"]
