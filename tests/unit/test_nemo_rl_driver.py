"""What ray.sub runs for us, run by a real shell: the driver's text of every production stage, and a node's setup."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.backends.nemo_rl.checks.places import any_launch
from scripts.backends.nemo_rl.command import (
    DRIVER_STARTED,
    PORTS,
    Launch,
    cluster_environment,
    hydra_overrides,
)
from scripts.backends.nemo_rl.outcome import cause_of
from scripts.backends.nemo_rl.releases import load_releases
from scripts.backends.nemo_rl.runtime import container_environment
from scripts.backends.nemo_rl.train import launch_of, train, warn_of_ports
from scripts.backends.protocol import Allocation, StopRequest, TrainingJob
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.recipe.load import load_site
from scripts.slurm.client import Job
from scripts.stage.stage import Stage
from tests.conftest import ROOT
from tests.production import CHECKOUTS, PRODUCTION, needs_checkouts, recipe_of

RECIPES = {name: recipe_of(name) for name in PRODUCTION}
STAGES = [(name, stage) for name, recipe in RECIPES.items() for stage in recipe.stages]
MODEL = "/models/it's $a model"
DRIVER = """
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump({"argv": sys.argv, "prefix": sys.prefix, "environment": dict(os.environ)}, file)
"""
TRANSFORMERS = """
import os
class AutoConfig:
    @classmethod
    def from_pretrained(cls, name, **options):
        if name == "/no/model":
            raise OSError("no such model")
        with open(os.environ["LOADED"], "a") as file:
            print(cls.__name__, name, options, file=file)
class AutoTokenizer(AutoConfig):
    pass
"""


def uv_of(version: str, cache: pytest.Cache) -> Path:
    """uv in this version: this Python's own, or one that pip installs from the package index once."""
    try:
        if importlib.metadata.version("uv") == version:
            return Path(sys.executable).with_name("uv")
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = cache.mkdir(f"uv-{version}")
    if not (folder / "bin/uv").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", f"uv=={version}"]
        if subprocess.run(pip, check=False, capture_output=True).returncode != 0:
            pytest.skip(f"uv {version} is neither installed nor to be had from the package index")
    return folder / "bin/uv"


@pytest.fixture(scope="module")
def container(tmp_path_factory, request):
    """Of a release: a checkout with a driver that says how it was called, and a container's environment for it.

    Where the release starts its driver by uv, the checkout is a project without dependencies, and its environment lies
    elsewhere, as in the images.
    """
    made: dict[str, tuple[Path, dict[str, str]]] = {}

    def make(name: str) -> tuple[Path, dict[str, str]]:
        if name in made:
            return made[name]
        release, root = load_releases()[name], tmp_path_factory.mktemp(name)
        checkout, programs = root / "checkout", root / "bin"
        for recipe in RECIPES.values():
            for stage in recipe.stages.values() if recipe.release == name else ():
                (checkout / stage.entry).parent.mkdir(parents=True, exist_ok=True)
                (checkout / stage.entry).write_text(DRIVER)
        (checkout / "transformers.py").write_text(TRANSFORMERS)
        programs.mkdir()
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        if release.python == "python":
            (programs / "python").symlink_to(sys.executable)
        else:
            (programs / "uv").symlink_to(uv_of(release.versions["uv"], request.config.cache))
            project = '[project]\nname = "made"\nversion = "1"\nrequires-python = ">=3.11"\n'
            (checkout / "pyproject.toml").write_text(project)
            environment |= {"UV_OFFLINE": "1", "UV_PYTHON": sys.executable, "UV_PROJECT_ENVIRONMENT": f"{root}/venv"}
            subprocess.run(["uv", "sync"], cwd=checkout, env=environment, check=True, capture_output=True)
        made[name] = checkout, environment
        return made[name]

    return make


@pytest.fixture
def started(container, tmp_path):
    """Run the driver's text of a stage as ray.sub does; `changes` to its start. What it printed and what was called."""

    def start(name: str, stage: str, **changes) -> tuple[subprocess.CompletedProcess, Launch, dict | None]:
        checkout, environment = container(RECIPES[name].release)
        run, record = tmp_path / "a run", tmp_path / "record.json"
        (run / "logs").mkdir(parents=True)
        launch = replace(
            any_launch(stage, RECIPES[name], changes.pop("checkout", checkout)),
            **{"model": MODEL, "run": run, "save_by": time.time() + 8940} | changes,
        )
        text = f"cd {shlex.quote(str(checkout))} && {cluster_environment(launch, tmp_path, 8)['COMMAND']}"
        recording = {"RECORD": str(record), "LOADED": str(tmp_path / "loaded")}
        done = subprocess.run(
            ["bash", "-c", text], env=environment | recording, cwd=tmp_path, text=True, capture_output=True, check=False
        )
        return done, launch, json.loads(record.read_text()) if record.exists() else None

    return start


def test_there_are_51_production_stages():
    assert len(STAGES) == 51, "45 of models, six generic steps"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_every_stages_driver_is_reached_with_all_that_it_is_told(started, container, tmp_path, name, stage):
    done, launch, called = started(name, stage)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    own, overrides = launch.runtime.settings.overrides, hydra_overrides(launch)
    told = overrides[: len(overrides) - len(own)]
    entry, option, config, *words = called["argv"]
    deadline = words.pop(len(told))
    assert (entry, option, config) == (f"./{launch.runtime.settings.entry}", "--config", launch.runtime.settings.config)
    assert words == [*told, *own]
    assert re.fullmatch(r"checkpointing\.checkpoint_must_save_by='00:02:2[89]:\d\d'", deadline)
    assert launch.runtime.environment.items() <= called["environment"].items()
    assert called["environment"]["PYTHONPATH"] == str(launch.runtime.checkout)
    if "uv" in launch.runtime.release.python:
        assert called["prefix"] == container(RECIPES[name].release)[1]["UV_PROJECT_ENVIRONMENT"]
    teachers = [f"/teachers/{start}" for start in dict.fromkeys(launch.runtime.settings.teachers.values())]
    assert (tmp_path / "loaded").read_text().splitlines() == [
        line
        for model in (MODEL, *teachers)
        for line in (
            f"AutoConfig {model} {{'trust_remote_code': True}}",
            f"AutoTokenizer {model} {{'trust_remote_code': True, 'use_fast': True}}",
        )
    ]
    assert float((launch.run / DRIVER_STARTED).read_text()) == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(("name", "stage"), [("super3", "rlvr1"), ("omni3", "mpo")])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "/no/model"}, "OSError: no such model"),
        ({"run": Path("/no")}, "/no/logs/driver_started: No such file"),
        ({"checkout": Path("/no/checkout")}, "/no/checkout: No such file"),
    ],
)
def test_the_first_line_that_fails_ends_the_driver(started, name, stage, changes, says):
    done, _, called = started(name, stage, **changes)
    assert done.returncode != 0
    assert says in done.stderr
    assert called is None


def test_uv_is_the_one_of_the_releases_image():
    uv = load_releases()["nano-v3-omni"].versions["uv"]
    assert f"ARG UV_VERSION={uv}\n" in (ROOT / "containers/omni.Dockerfile").read_text()


def test_what_this_machine_says_of_itself_does_not_reach_a_container(monkeypatch):
    for name in ("PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/lustre/hf")
    told = container_environment()
    assert told["HF_HOME"] == "/lustre/hf"
    assert not {"PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV"} & told.keys()


# A node's setup


class Node:
    """A node of a cluster: recording programs in place of those that would change this machine, and ray.sub's logs."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.logs, self.calls = folder / "bin", folder / "7-logs", folder / "calls"
        self.setup = self.logs / "setup_command.sh"
        self.programs.mkdir()
        self.logs.mkdir()
        launch = any_launch("rlvr1", RECIPES["super3-b200"], folder)
        self.setup.write_text(cluster_environment(launch, folder, 8)["SETUP_COMMAND"])
        (self.logs / ".shared_fs_canary").touch()
        for name in ("apt-get", "wget", "ln", "ray"):
            self.program(name)
        self.program("sleep", f'[ "$1" = 10 ] || exec {shutil.which("sleep")} "$1"')

    def program(self, name: str, body: str = "") -> None:
        """Put a program first in PATH that notes how it is called."""
        path = self.programs / name
        path.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >> {self.calls}\n{body}\n')
        path.chmod(0o755)

    def run(self, step: str, **variables: str) -> tuple[int, str]:
        """Run a step's shell text there and end what it leaves behind; its status and output."""
        log = self.logs / "step.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-x", "-c", step],
                env={"PATH": f"{self.programs}:/usr/bin:/bin", **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(30), log.read_text()
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)

    def called(self, name: str) -> list[str]:
        """How a program was called, in order."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.split()[0] == name]


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("stage", RECIPES["super3-b200"].stages)
def test_every_stage_of_super_v3_sets_its_nodes_up_and_no_other_releases(tmp_path, stage):
    ours, others = (
        cluster_environment(any_launch(stage, RECIPES[name], tmp_path), tmp_path, 8)
        for name in ("super3-b200", "super3")
    )
    assert "apptainer" in ours["SETUP_COMMAND"] and "SETUP_COMMAND" not in others


def test_apptainer_is_installed_after_an_update_and_tried_again_where_the_network_fails(node):
    node.program("wget", f'[ "$(grep -c ^wget {node.calls})" -ge 3 ]')
    assert node.run(f"bash {node.setup}; echo goes on")[1].endswith("\ngoes on\n")
    assert [line.split()[:2] for line in node.calls.read_text().splitlines()[-5:]] == [
        ["apt-get", "update"],
        ["apt-get", "install"],
        ["wget", "--output-document=/tmp/apptainer.deb"],
        ["apt-get", "install"],
        ["ln", "-sf"],
    ]
    assert (len(node.called("wget")), len(node.called("sleep"))) == (3, 2)


def test_where_apptainer_is_nothing_is_installed(node):
    for name in ("apptainer", "singularity"):
        node.program(name, "")
    assert node.run(f"bash {node.setup}; echo goes on")[1].endswith("\ngoes on\n")
    assert not node.calls.exists()


STAND_IN = ROOT / "tests/slurm/nemo_rl_stand_in/ray.sub"


def stand_ins_step(side: str) -> str:
    """What the stand-in's ray.sub runs in a container: the head's side or a worker's."""
    text = STAND_IN.read_text()
    return text[text.index("set_up() {") : text.index("functions=")] + side


def real_step(side: str) -> str:
    """What super-v3's ray.sub runs in a container, as its own shell text expands it."""
    text = Path(CHECKOUTS, "super-v3/ray.sub").read_text()
    start = text.index(f"{side}_cmd=$(cat <<EOF")
    return text[start : text.index("\nEOF\n)", start) + len("\nEOF\n)")] + f'\nprintf %s "${side}_cmd"'


def assert_that_a_failed_setup_ends_the_step(node: Node, step: str) -> None:
    node.program("apt-get", "exit 100")
    status, said = node.run(step, LOG_DIR=str(node.logs), SETUP_COMMAND="set", COMMAND="", GPUS_PER_NODE="8")
    assert status == -signal.SIGTERM, said
    assert len(node.called("apt-get")) == 5
    assert not [call for call in node.called("ray") if "start" in call], "this node never joins"
    assert "no Apptainer after five tries" in said
    (node.logs / "ray-sub-7.log").write_text("[ERROR] Background srun 'ray-worker-1' died (pid=9).\n")
    cause = cause_of(None, node.logs / "ray-sub-7.log", node.logs)
    assert (cause.kind, cause.what) == ("lost", "a node could not be set up")
    assert "no Apptainer after five tries" in cause.lines[0]


@pytest.mark.parametrize("side", ["lead", "follow"])
def test_a_node_that_cannot_be_set_up_ends_its_step_and_says_why(node, tmp_path, side):
    (node.logs / "STARTED_RAY_HEAD").touch()
    step = stand_ins_step(side).replace("/tmp/ray", str(tmp_path / "ray"))  # noqa: S108
    assert_that_a_failed_setup_ends_the_step(node, step)


@needs_checkouts
@pytest.mark.parametrize("side", ["head", "worker"])
def test_a_node_that_cannot_be_set_up_ends_the_real_ray_subs_step(node, tmp_path, side):
    ports = ["PORT", "RAY_CLIENT_SERVER_PORT", "DASHBOARD_PORT", "MIN_WORKER_PORT", "MAX_WORKER_PORT"]
    ports += ["NODE_MANAGER_PORT", "OBJECT_MANAGER_PORT", "RUNTIME_ENV_AGENT_PORT", "DASHBOARD_AGENT_GRPC_PORT"]
    ports += ["DASHBOARD_AGENT_LISTEN_PORT", "METRICS_EXPORT_PORT"]
    known = {"LOG_DIR": str(node.logs), "SETUP_COMMAND_FILE": str(node.logs / "setup_command.sh"), "num_retries": "3"}
    known |= dict.fromkeys(ports, "1") | {"GPUS_PER_NODE": "8", "head_node_ip": "localhost", "ip_head": "localhost:1"}
    known |= dict.fromkeys(["RAY_LOG_SYNC_FREQUENCY", "RAY_DEBUGGER_ARGS"], "") | {"node_i": "node1"}
    expanded = subprocess.run(
        ["bash", "-euc", real_step(side)],
        env={"PATH": "/usr/bin:/bin", **known},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert 'bash "$SETUP' not in expanded and str(node.logs / "setup_command.sh") in expanded
    step = expanded.replace(f"/launch-{side}.sh", str(tmp_path / "launch.sh")).replace("/opt/", str(tmp_path / "opt/"))
    assert_that_a_failed_setup_ends_the_step(node, step)


# --- Watching ray.sub ---

PORT_NAMES = re.compile(r"^(\w*PORT)=(\$\{\1:-\d+\})", re.MULTILINE)
HOPELESS_DRIVER = """
mkdir -p "$BASE_LOG_DIR/$SLURM_JOB_ID-logs" "$IMPORT"
printf 'loading\\n%s\\n' "$SAID" > "$BASE_LOG_DIR/$SLURM_JOB_ID-logs/ray-driver.log"
exec sleep 20
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Train a stage by a ray.sub whose driver says one line and lives on; what was raised, and the import's folder."""

    def train_with(said: str) -> tuple[UserError, Path]:
        for name in ("squeue", "srun"):  # which has no container to remove
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (tmp_path / "checkout").mkdir()
        (tmp_path / "checkout/ray.sub").write_text(HOPELESS_DRIVER)
        recipe = RECIPES["super3"]
        site = load_site(ROOT / "config/sites/h100.yaml", recipe)
        nemo_rl = site.nemo_rl.model_copy(
            update={"cache": f"{tmp_path}/cache", "checkouts": {recipe.release: f"{tmp_path}/checkout"}}
        )
        site = site.model_copy(update={"nemo_rl": nemo_rl})
        stage = Stage(recipe, tmp_path / "results", "rlvr1")
        rows = {"sha256": "0", "rows": 51200, "environments": {}}
        write_json(stage.manifest, {"train": rows, "validation": rows})
        job = TrainingJob.of(stage, max_num_steps=3, threads=1, stop=StopRequest())
        job.run.mkdir(parents=True)
        launch = launch_of(job, site)
        imported = launch.runtime.import_of(launch.model)
        monkeypatch.setenv("SAID", said)
        monkeypatch.setenv("IMPORT", str(imported / "iter_0000000"))
        monkeypatch.setattr("scripts.backends.nemo_rl.train.LOOK_SECONDS", 0.05)
        nodes = Job("7", "RUNNING", ("node1",), None, cpus_per_node=16, requeues=True, restarts=0)
        began = time.monotonic()
        with pytest.raises(UserError) as error:
            train(job, Allocation(nodes, site))
        assert time.monotonic() - began < 10, "long before the driver's own end"
        return error.value, imported

    return train_with


def test_a_driver_whose_import_leaves_weights_out_is_ended_at_once_and_its_import_is_used_by_no_other(trained):
    error, imported = trained("(MegatronPolicyWorker pid=7) WARNING: Can't find mtp.0.experts.0.weight in hf_keys")
    assert not isinstance(error, CutOffError) and "would stay random (docs/traps.md, trap 89)" in str(error)
    (aside,) = imported.parent.iterdir()
    assert aside.name.startswith(f"spoilt_{imported.name}.")


def test_a_driver_whose_thread_of_rollouts_has_failed_is_ended_at_once_and_tried_again(trained):
    error, imported = trained("(AsyncTrajectoryCollector pid=7) ❌ Error in trajectory collection: no server")
    assert isinstance(error, CutOffError) and "(docs/traps.md, trap 99)" in str(error) and imported.exists()


@needs_checkouts
@pytest.mark.parametrize("release", load_releases())
def test_the_real_ray_subs_ports_lie_outside_those_that_kernels_lend(release):
    said = PORT_NAMES.findall(Path(CHECKOUTS, release, "ray.sub").read_text())
    names = [name for name, _ in said if "SANDBOX" not in name and name != "DASHBOARD_PORT"]
    assert {*names} == {*PORTS}
    script = "".join(f"{name}={default}\n" for name, default in said) + "".join(f"echo ${name}\n" for name in names)
    shown = subprocess.run(["bash", "-euc", script], env=PORTS, capture_output=True, text=True, check=True).stdout
    assert max(map(int, shown.split())) < 9000


@pytest.mark.parametrize(
    ("lent", "release", "warned"),
    [("9000 65000", "v0.7.0", True), ("32768 60999", "v0.7.0", False), ("9000 65000", "main", False)],
)
def test_a_node_that_lends_nemo_rls_ports_to_others_is_told_before_the_start(
    tmp_path, monkeypatch, capsys, lent, release, warned
):
    (tmp_path / "range").write_text(lent)
    monkeypatch.setattr("scripts.backends.nemo_rl.train.PORT_RANGE", tmp_path / "range")
    warn_of_ports("rlvr1", load_releases()[release])
    assert ("net.ipv4.ip_local_reserved_ports=9000-28000" in capsys.readouterr().out) is warned
