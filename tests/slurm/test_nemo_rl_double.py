"""The doubles of what NeMo-RL's launchers meet: containers on a Slurm, its checkout, its driver and its converters."""

import importlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.production import needs_checkouts
from tests.programs import until
from tests.slurm.cluster import Cluster, ClusterError
from tests.slurm.nemo_rl import CONFIG, OLD_CONFIG, STAND_IN, make_checkout
from tests.slurm.processes import PATH


@pytest.fixture(scope="module")
def pyxis(possible, tmp_path_factory):
    """Two idle hosts on which steps may ask for containers."""
    with Cluster(tmp_path_factory.mktemp("pyxis"), hosts=2, pyxis=True) as cluster:
        yield cluster


def containers(cluster: Cluster) -> list[dict]:
    """What was asked for so far, a record a task."""
    return [json.loads(line) for line in (cluster.directory / "containers.jsonl").read_text().splitlines()]


# Containers


def test_a_step_in_a_container_is_recorded_and_runs_in_its_directory(pyxis, tmp_path):
    image = tmp_path / "image.sqsh"
    image.touch()
    options = (f"--container-image={image}", f"--container-workdir={tmp_path}", "--container-name=ray-head")
    more = ("--no-container-mount-home", "--container-writable", f"--container-mounts={tmp_path}:/in:ro,/usr")
    output = pyxis.run("srun", "--nodes=2", "--mpi=pmix", *options, *more, "bash", "-c", "pwd; echo $PMIX_RANK")
    assert sorted(output.split()) == [str(tmp_path), str(tmp_path), "0", "1"]
    first, second = sorted(containers(pyxis)[-2:], key=lambda record: record["task"])
    assert [first.pop("node"), second.pop("node")] == pyxis.hosts
    assert [first.pop("task"), second.pop("task")] == [0, 1]
    job = first.pop("job")
    assert first == {
        "step": 0,
        "image": str(image),
        "runs": str(image),
        "mounts": f"{tmp_path}:/in:ro,/usr",
        "workdir": str(tmp_path),
        "name": "ray-head",
        "env": None,
        "mount_home": False,
        "writable": True,
        "remap_root": False,
    }
    assert second == first | {"job": job}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--container-image=/none.sqsh"], "No such file or directory: /none.sqsh"),
        (["--container-image=a/b:1", "--container-mounts=/usr:/x,/none:/y"], "source path does not exist: /none"),
        (["--container-image=a/b:1", "--container-workdir=/none"], "couldn't chdir to /none"),
    ],
)
def test_a_step_fails_without_its_image_mount_or_directory(pyxis, options, message):
    with pytest.raises(ClusterError, match=rf"ended with 1: (.|\n)*pyxis: .*{message}"):
        pyxis.run("srun", *options, "true")


def test_a_batch_script_takes_the_options_too_and_without_an_image_nothing_is_recorded(pyxis, tmp_path):
    options = ("--container-image=a/b:1", f"--container-workdir={tmp_path}", "--container-remap-root")
    pyxis.run("sbatch", "--wait", f"--output={tmp_path}/out", *options, "--wrap=pwd")
    assert (tmp_path / "out").read_text().splitlines() == [str(tmp_path)]
    before = containers(pyxis)
    assert [(record["step"], record["remap_root"]) for record in before[-1:]] == [("batch", True)]
    pyxis.run("srun", "--container-workdir=/none", "true")
    assert containers(pyxis) == before


def test_nothing_of_a_container_outlives_its_task(pyxis):
    pyxis.run("srun", "--nodes=2", "--container-image=a/b:1", "bash", "-c", "setsid sleep 4321 > /dev/null 2>&1 &")
    assert pyxis.left_running() == []


# The driver, without Slurm and Ray


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout with data in it; what a test runs there has directories of its own."""
    return with_data(make_checkout(tmp_path_factory.mktemp("nemo_rl") / "checkout"))


@pytest.fixture
def stand_in(monkeypatch):
    """A function that imports a module of the stand-in."""
    monkeypatch.syspath_prepend(STAND_IN)
    return lambda name: importlib.import_module(f"nemo_rl.{name}")


def with_data(directory: Path) -> Path:
    """Forty rows of two agents."""
    rows = [{"id": i, "agent_ref": {"name": f"agent{i % 2}"}, "responses_create_params": {}} for i in range(40)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def driver(directory: Path, *overrides: str) -> list[str]:
    """The command of a driver with its checkpoints and logs in `directory`."""
    program = ("python", "-W", "ignore", "examples/nemo_gym/run_grpo_nemo_gym.py", f"--config={CONFIG}")
    places = (f"checkpointing.checkpoint_dir={directory}/checkpoints", f"logger.log_dir={directory}/logs")
    given = ("policy.model_name=org/model", "data.train.data_path=train.jsonl", "checkpointing.save_period=2")
    return [*program, *places, *given, *overrides]


def run(checkout: Path, *command: str | Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command of the checkout; what it printed, both streams together."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=checkout,
        env=os.environ | {"PATH": PATH} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def train(checkout: Path, directory: Path, *overrides: str) -> subprocess.CompletedProcess:
    """Run the driver without Ray."""
    return run(checkout, *driver(directory, "++stand_in.ray=false", *overrides))


def steps(directory: Path) -> list[str]:
    """What lies among the checkpoints."""
    return sorted(path.name for path in (directory / "checkpoints").glob("*"))


def infos(directory: Path) -> list[Path]:
    """What the checkpoints say of themselves."""
    return sorted((directory / "checkpoints").glob("step_*/training_info.json"))


def tensors(directory: Path, step: int) -> bytes:
    """The weights of a checkpoint."""
    return (directory / f"checkpoints/step_{step}/policy/weights/iter_0000000/__0_0.distcp").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(checkout, tmp_path_factory):
    """A run of five steps, saved at every second and at the end, with curves."""
    directory = tmp_path_factory.mktemp("undisturbed")
    done = train(checkout, directory, "grpo.max_num_steps=5", "logger.tensorboard_enabled=true")
    assert done.returncode == 0, done.stdout
    assert "Max number of steps has been reached" in done.stdout
    return directory


def test_a_run_saves_whole_checkpoints_and_logs_curves(undisturbed):
    assert steps(undisturbed) == ["step_2", "step_4", "step_5"]
    last = undisturbed / "checkpoints/step_5"
    info = json.loads((last / "training_info.json").read_text())
    assert [info["current_step"], info["total_steps"], info["consumed_samples"]] == [5, 0, 20]
    assert isinstance(info["total_valid_tokens"], float)
    settings = yaml.safe_load((last / "config.yaml").read_text())
    assert settings["policy"]["tokenizer"]["name"] == "org/model"
    assert settings["policy"]["train_global_batch_size"] == 16
    assert settings["env"]["nemo_gym"]["uv_venv_dir"].endswith("/gym_venvs")
    iteration = {path.name for path in (last / "policy/weights/iter_0000000").iterdir()}
    assert iteration >= {"run_config.yaml", "metadata.json", "common.pt", "__0_0.distcp"}
    assert (last / "policy/weights/latest_checkpointed_iteration.txt").read_text() == "0"
    assert (last / "policy/tokenizer/tokenizer_config.json").exists()
    assert (last / "replay_buffer.pt").exists()

    events = EventAccumulator(str(undisturbed / "logs/exp_001/tensorboard")).Reload()
    names = set(events.Tags()["scalars"])
    assert names >= {"train/reward", "train/total_reward/stddev", "train/loss", "timing/train/total_step_time"}
    assert names >= {"train/agent0/reward/mean", "train/agent1/reward/mean", "train/gen_tokens_per_sample/max"}
    assert [each.step for each in events.Scalars("train/reward")] == [1, 2, 3, 4, 5]
    assert {each.value for each in events.Scalars("train/kl_penalty")} == {0}


SYNCHRONOUS = "grpo.async_grpo.enabled=false"


def test_a_run_killed_while_saving_goes_on_to_the_same_weights(checkout, undisturbed, tmp_path):
    fault = ("++stand_in.fault=die", "++stand_in.at=4", f"++stand_in.once={tmp_path}/once", "grpo.max_num_steps=5")
    assert train(checkout, tmp_path, SYNCHRONOUS, *fault).returncode == -signal.SIGKILL
    assert steps(tmp_path) == ["step_2", "tmp_step_4"]
    (tmp_path / "checkpoints/tmp_step_4/left").touch()
    again = train(checkout, tmp_path, SYNCHRONOUS, *fault)
    assert "Step 3/5" in again.stdout and "Step 2/5" not in again.stdout
    assert steps(tmp_path) == ["step_2", "step_4", "step_5"]
    assert (tmp_path / "checkpoints/step_4/left").exists(), "what a killed save left is written over, not removed"
    assert [tensors(tmp_path, step) for step in (4, 5)] == [tensors(undisturbed, step) for step in (4, 5)]
    assert [path.name for path in sorted((tmp_path / "logs").iterdir())] == ["exp_001", "exp_002"]


def test_each_asynchronous_start_passes_over_the_rows_in_flight_and_the_last_batch(stand_in):
    data = stand_in("dataloader")

    def trained(most: int, loader: dict | None = None, buffer: dict | None = None, step: int = 0):
        batches = data.Loader([{"id": number} for number in range(14)], 2, workers=1)
        if loader:
            batches.load_state_dict(loader)
        collector, found = data.Collector(batches, 1, step, buffer, waits_for_last=False), []
        while step < most and (rows := collector.rows_of(step)):
            step += 1
            found.append(rows[0]["id"] // 2)
            collector.has_trained(step)
        return found, batches.state_dict(), collector.state_dict(), step

    assert trained(9)[0] == [0, 1, 2, 3, 4, 5], "seven batches, of which the last is lost"
    first, *left = trained(1)
    assert (first, left[0]["_snapshot"]["_snapshot_step"], left[0]["_iterator_finished"]) == ([0], 4, False)
    second, *left = trained(9, *left)
    assert second == [1, 4, 5], "the second was buffered, two were in flight and in hand"
    assert left[0]["_iterator_finished"]
    third = trained(5, *left)[0]
    assert third == [0], "a loader that had met its end begins anew"


def test_another_seed_or_other_rows_make_other_weights(checkout, undisturbed, tmp_path):
    train(checkout, tmp_path / "seed", "grpo.max_num_steps=2", "grpo.seed=43")
    train(checkout, tmp_path / "rows", "grpo.max_num_steps=2", "grpo.num_prompts_per_step=5")
    assert len({tensors(tmp_path / "seed", 2), tensors(tmp_path / "rows", 2), tensors(undisturbed, 2)}) == 3


def test_a_model_changed_in_place_is_not_imported_again(stand_in, monkeypatch, tmp_path):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "kept"))
    model, found = tmp_path / "model", []
    model.mkdir()
    for content, again in (("first", False), ("second", False), ("second", True)):
        (model / "model.safetensors").write_text(content)
        found.append(stand_in("weights").imported(str(model), again))
    assert found[0] == found[1] != found[2]
    assert (tmp_path / "kept" / f"model_{str(model).replace('/', '_')}" / "iter_0000000").is_dir()
    with pytest.raises(OSError, match="neither a directory"):
        stand_in("weights").imported("/none", False)


def test_a_run_saves_and_ends_before_its_deadline(checkout, tmp_path):
    limits = ("checkpointing.checkpoint_must_save_by=00:00:00:02", "++stand_in.step_seconds=0.5")
    began = time.monotonic()
    done = train(checkout, tmp_path, *limits, "checkpointing.save_period=100")
    assert done.returncode == 0
    assert "Timeout has been reached, stopping training early" in done.stdout
    assert steps(tmp_path) == ["step_3"]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("asynchronous", "fault", "status", "words", "left"),
    [
        (True, "error", 0, "in async loop", ["step_2"]),
        (False, "error", 1, "Traceback", ["step_2"]),
        (True, "refit_failed", 0, "Policy generation refit failed", []),
    ],
)
def test_faults_end_a_run_as_they_end_the_real_one(checkout, tmp_path, asynchronous, fault, status, words, left):
    loop = f"grpo.async_grpo.enabled={str(asynchronous).lower()}"
    done = train(checkout, tmp_path, loop, f"++stand_in.fault={fault}", "++stand_in.at=3", "grpo.max_num_steps=4")
    assert (done.returncode, words in done.stdout, steps(tmp_path)) == (status, True, left)


@pytest.mark.parametrize(("overrides", "step"), [(["++stand_in.fault=hang", "++stand_in.at=3"], 3), ([], 10)])
def test_a_run_that_hangs_or_has_no_more_data_does_not_end_before_it_is_told(checkout, tmp_path, overrides, step):
    command = driver(tmp_path, "++stand_in.ray=false", *overrides)
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=checkout, env=os.environ | {"PATH": PATH}, stdout=output, stderr=output)
    until(lambda: f"Step {step}/" in log.read_text())
    time.sleep(1)
    assert process.poll() is None
    assert f"Step {step + 1}/" not in log.read_text()
    process.terminate()
    assert process.wait() == signal.SIGTERM, "as a driver of Ray's ends"


def test_the_synchronous_loop_ends_with_its_data_and_keeps_the_best_and_the_newest(checkout, tmp_path):
    kept = ("checkpointing.keep_top_k=1", "checkpointing.metric_name=train:loss", "checkpointing.save_period=1")
    done = train(checkout, tmp_path, SYNCHRONOUS, *kept, "checkpointing.higher_is_better=false")
    assert (done.returncode, "Max number of steps" in done.stdout) == (0, False)
    losses = {int(path.parent.name[5:]): json.loads(path.read_text())["train:loss"] for path in infos(tmp_path)}
    assert 10 in losses and len(losses) == 2, "ten batches; the newest is kept though it is not the best"
    assert min(losses, key=losses.get) != 10


def test_a_driver_of_dpo_says_in_its_own_words_where_it_is(checkout, tmp_path):
    program = ("python", "-W", "ignore", "examples/run_dpo.py", "--config=examples/configs/dpo.yaml")
    told = (f"checkpointing.checkpoint_dir={tmp_path}/checkpoints", f"logger.log_dir={tmp_path}/logs")
    told += ("policy.model_name=org/model", "data.train.data_path=train.jsonl", "policy.train_global_batch_size=8")
    told += ("++stand_in.ray=false", "dpo.val_period=2", "checkpointing.save_period=2")
    done = run(checkout, *program, *told)
    assert (done.returncode, "Step 5/5" in done.stdout, "Max number" in done.stdout) == (0, True, False)
    assert steps(tmp_path) == ["step_2", "step_4", "step_5"]
    info = json.loads((tmp_path / "checkpoints/step_4/training_info.json").read_text())
    assert [info["epoch"], info["step"], info["total_steps"], info["consumed_samples"]] == [0, 4, 4, 32]
    assert "current_step" not in info and "validation-default_loss" in info


def test_the_main_release_ends_with_its_data(tmp_path):
    checkout = with_data(make_checkout(tmp_path / "checkout", "main"))
    done = train(checkout, tmp_path)
    assert (done.returncode, steps(tmp_path)[-1:]) == (1, ["step_8"])
    assert "dataloader exhausted" in done.stdout


def test_overrides_change_add_force_and_delete(stand_in):
    overrides = ["grpo.seed=7", "+grpo.new=[a, 2]", "++grpo.max_num_steps=3", "++grpo.other={x: 1}", "~grpo.val_period"]
    grpo = stand_in("config").load(STAND_IN / CONFIG, overrides)["grpo"]
    assert (grpo["seed"], grpo["new"], grpo["max_num_steps"], grpo["other"]) == (7, ["a", 2], 3, {"x": 1})
    assert "val_period" not in grpo


def test_a_misspelt_override_ends_the_driver(checkout, tmp_path):
    done = train(checkout, tmp_path, "grpo.max_num_step=1")
    assert (done.returncode, "OverridesError" in done.stdout, steps(tmp_path)) == (1, True, [])


# The converters


def convert(
    checkout: Path, source: Path, output: Path, kind: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """Run a converter on a run's fifth step."""
    step = source / "checkpoints/step_5"
    places = ("--megatron-ckpt-path", step / "policy/weights/iter_0000000", "--hf-ckpt-path", output)
    program = f"examples/converters/convert_megatron_to_hf{kind}.py"
    return run(checkout, "python", "-W", "ignore", program, "--config", step / "config.yaml", *places, **environment)


def test_a_checkpoint_becomes_a_hugging_face_directory_once(checkout, undisturbed, tmp_path):
    assert convert(checkout, undisturbed, tmp_path / "one").returncode == 0
    assert convert(checkout, undisturbed, tmp_path / "two", "_gpu", RANK="0").returncode == 0
    again = convert(checkout, undisturbed, tmp_path / "one")
    assert (again.returncode, "FileExistsError" in again.stdout) == (1, True)

    index = json.loads((tmp_path / "one/model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert sum(tensor.nbytes for shard in shards for tensor in load_file(tmp_path / "one" / shard).values()) == 640
    assert json.loads((tmp_path / "one/config.json").read_text())["torch_dtype"] == "bfloat16"
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(
        [*shards, "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    )
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)


# All of it


def test_an_older_release_has_other_files_and_sets_fewer_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("STAGECOACH_NEMO_RL", raising=False)
    old = make_checkout(tmp_path / "checkout", "super-v3")
    assert "NRL_JOB_START_EPOCH" not in (old / "ray.sub").read_text()
    assert (old / OLD_CONFIG).exists() and not (old / CONFIG).exists()
    converters = {path.name for path in (old / "examples/converters").iterdir()}
    assert converters == {"convert_megatron_to_hf.py", "convert_megatron_to_hf_super.py"}
    assert run(old, "bash", "-n", "ray.sub").returncode == 0


def submit(cluster: Cluster, checkout: Path, command: str) -> dict[str, str]:
    """Submit the checkout's ray.sub on both hosts and wait for its end; what Slurm says of the job."""
    given = {"CONTAINER": "nvcr.io#nvidia/nemo-rl:v0.7.0", "MOUNTS": f"{checkout}:{checkout}", "COMMAND": command}
    given |= {"SANDBOX_CONTAINER": "nvcr.io#sandbox:1", "SANDBOX_COMMAND": "python -m http.server 6000"}
    options = ("--nodes=2", "--account=lab", "--partition=batch", "--job-name=run", "--time=10", "--gres=gpu:8")
    batch = ("sbatch", "--parsable", *options, "--output=%j.out", "ray.sub")
    number = run(checkout, *batch, **cluster.environment, **given).stdout.strip()
    until(lambda: show(cluster, number)["JobState"] in {"COMPLETED", "FAILED"}, 240)
    cluster.wait_idle()
    return show(cluster, number)


def show(cluster: Cluster, number: str) -> dict[str, str]:
    """What Slurm says of a job."""
    words = cluster.run("scontrol", "show", "job", number, "--oneliner").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_a_driver_alone_on_a_host_finds_too_few_gpus(pyxis, checkout, tmp_path):
    command = ("srun", "--container-image=a/b:1", f"--container-workdir={checkout}", *driver(tmp_path))
    done = run(checkout, *command, **pyxis.environment, NRL_VIRTUAL_CLUSTER_MAX_RETRIES="1")
    assert done.returncode == 1
    assert "Requested 16 GPUs, but only 8 are available" in done.stdout
    until(lambda: not pyxis.processes("node1"))


@needs_checkouts
@pytest.mark.parametrize("release", ["v0.7.0", "main"])
def test_the_real_ray_sub_runs_drivers_over_two_hosts_and_ends_as_they_end(pyxis, tmp_path, release):
    checkout = with_data(make_checkout(tmp_path / "checkout", release))
    before = len(containers(pyxis))
    slow = ("checkpointing.checkpoint_must_save_by=00:00:00:02", "++stand_in.step_seconds=0.5", "grpo.max_num_steps=9")
    to_deadline, to_end = driver(tmp_path, *slow), driver(tmp_path, "grpo.max_num_steps=5")
    job = submit(pyxis, checkout, f"{' '.join(to_deadline)} && {' '.join(to_end)} && exit 7")
    logs = checkout / f"{job['JobId']}-logs"
    output = (logs / "ray-driver.log").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "7:0"), output
    assert "Timeout has been reached" in output and "Step 4/5" in output
    assert steps(tmp_path) == ["step_2", "step_3", "step_4", "step_5"]
    until(lambda: not pyxis.left_running())

    files = {".shared_fs_canary", "driver_command.sh", "ray-head.log", "ray-worker-0.log", "STARTED_RAY_HEAD"}
    assert files <= {path.name for path in logs.iterdir()}
    assert {path.name for path in logs.glob("sandbox/S*")} == {"SANDBOX_READY_node1", "SANDBOX_READY_node2"}
    asked = containers(pyxis)[before:]
    assert sorted(record["node"] for record in asked if record["image"] == "nvcr.io#sandbox:1") == pyxis.hosts
    head, worker = sorted((record for record in asked if record["name"]), key=lambda record: record["name"])
    assert (head["name"], head["node"], worker["name"], worker["node"]) == ("ray-head", "node1", "ray-worker", "node2")
    for record in (head, worker):
        assert (record["image"], record["workdir"]) == ("nvcr.io#nvidia/nemo-rl:v0.7.0", str(checkout))
        assert (record["mounts"], record["mount_home"]) == (f"{checkout}:{checkout}", False)


def test_ray_sub_needs_what_slurm_says_of_the_job(pyxis, tmp_path):
    script = make_checkout(tmp_path / "checkout") / "ray.sub"
    given = {"CONTAINER": "a/b:1", "MOUNTS": "", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = run(tmp_path, "bash", script, **pyxis.environment, **given)
    assert done.returncode != 0
    assert re.search(r"SLURM_\w+: unbound variable", done.stdout)
