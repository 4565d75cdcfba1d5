"""NVIDIA's own pyxis and enroot: what they do of srun's options, and a stage of NeMo-RL's stand-in in real containers."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl.runtime import CONTAINERS as SCRIPT
from scripts.backends.nemo_rl.runtime import places_of
from tests.conftest import ROOT
from tests.slurm import containers
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl_chain import NemoRlChain

IMAGE_BYTES = 1 << 30  # the preflight takes less for a half-made import


@pytest.fixture(scope="module")
def built(possible):
    """The real pyxis and enroot; skips where they cannot be built."""
    if reason := containers.reason_missing():
        pytest.skip(reason)
    return containers.build()


@pytest.fixture(scope="module")
def cluster(built, tmp_path_factory):
    """Two hosts with the real pyxis."""
    with Cluster(tmp_path_factory.mktemp("pyxis"), hosts=2, containers=built) as cluster:
        yield cluster


PROBES = yaml.safe_load(Path(__file__).with_name("pyxis.yaml").read_text())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The images of the probes by name; the double needs files alone."""
    folder = tmp_path_factory.mktemp("images")
    made = {"IMAGE": folder / "image.sqsh", "OTHER": folder / "other.sqsh"}
    for path in made.values():
        path.touch() if containers.reason_missing() else containers.make_image(path, says=path.stem)
    return made


@pytest.fixture(scope="module", params=["double", "real"])
def probed(request, possible, tmp_path_factory):
    """Two hosts, with the double of pyxis or the real one."""
    if request.param == "real":
        yield request.getfixturevalue("cluster")
        return
    with Cluster(tmp_path_factory.mktemp("double"), hosts=2, pyxis=True, image={"IMAGE_SAYS": "image"}) as cluster:
        yield cluster


@pytest.mark.parametrize("name", PROBES)
def test_the_double_does_as_the_real_pyxis(probed, images, name):
    probe = {"after": [], "status": 0, "says": [], "only": False, "real": False} | PROBES[name]
    if probe["real"] and not probed.containers:
        pytest.skip("the double runs on the host")
    variables = {"IMAGE_SAYS": "host", "OTHER_ONE": "passes", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "LANGUAGE": "de"}

    def srun(*words: str) -> subprocess.CompletedProcess:
        *options, command = [re.sub("IMAGE$|OTHER$", lambda it: str(images[it[0]]), word) for word in words]
        return subprocess.run(
            ["srun", "--quiet", "--nodelist=node1", *options, "sh", "-c", command],
            env=probed.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    if probe["after"]:
        assert srun(*probe["after"]).returncode == 0
    done = srun(*probe["options"], probe["command"])
    assert done.returncode == probe["status"], done.stdout
    lines = done.stdout.splitlines()
    for pattern in probe["says"]:
        assert any(re.search(f"{pattern}$", line) for line in lines), (pattern, lines)
    assert not probe["only"] or len(lines) == len(probe["says"]), lines


class ContainerChain(NemoRlChain):
    """A chain whose containers see the machine's programs by mounts alone."""

    def _write_inputs(self) -> None:
        super()._write_inputs()
        releases = self.root / "envs/nemo-rl.yaml"
        table = yaml.safe_load(releases.read_text())
        table["releases"]["v0.7.0"]["sandbox_command"] = "exec httpd -f -p $NGINX_PORT"  # its image has busybox alone
        releases.write_text(yaml.safe_dump(table))
        path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/usr/sbin"))
        seen = {"PATH": path, "RAY_OVERRIDE_RESOURCES": '{"GPU":8}', "RAY_AUTH_MODE": "disabled"}
        for name in ("train", "sandbox"):
            (self.root / f"{name}.sqsh").unlink()
            image = containers.make_image(self.root / f"{name}.sqsh", says=name, **seen)
            os.truncate(image, IMAGE_BYTES)

    def write_site(self, **nemo_rl: object) -> None:
        super().write_site(**nemo_rl)
        path = self.root / "config/sites/double.yaml"
        site = yaml.safe_load(path.read_text())
        site["mounts"] += [f"{place}:{place}" for place in ("/usr", sys.prefix, sys.base_prefix)]
        path.write_text(yaml.safe_dump(site))


@pytest.fixture(scope="module")
def chain(cluster, tmp_path_factory):
    """A tree in which rlvr1 trains in containers, on nodes with the leftovers of another image."""
    other = containers.make_image(tmp_path_factory.mktemp("other") / "other.sqsh", says="other")
    for name in ("ray-head", "ray-worker", "mine"):
        cluster.run("srun", "--nodes=2", f"--container-image={other}", f"--container-name={name}", "true")
    chain = ContainerChain(tmp_path_factory.mktemp("nemo-rl"), cluster)
    chain.output = chain.train("results/double/rlvr1/hf")
    return chain


def test_a_stage_trains_in_the_image_of_its_site_on_nodes_with_old_containers(chain):
    print(chain.output[-3000:])
    (attempt,) = chain.attempts("rlvr1")
    assert attempt["outcome"] == "finished"
    left = {host: set(chain.cluster.run("enroot", "list", host=host).split()) for host in chain.cluster.hosts}
    for names in left.values():
        assert "pyxis_mine" in names
        assert not [name for name in names if name.startswith("pyxis_ray-") or name[6:].replace(".", "").isdigit()]


def test_the_sites_variables_win_over_the_images_in_the_driver_and_the_converter(chain):
    assert containers.ENVIRONMENT["NEMO_RL_VENV_DIR"] != f"{chain.root}/venvs", "there the converter's worker is not"
    assert (chain.results / "rlvr1/hf/record.json").is_file()
    command = next((chain.results / "rlvr1/logs").glob("*-logs/driver_command.sh")).read_text()
    assert f"export NEMO_RL_VENV_DIR={chain.root}/venvs" in command


@pytest.fixture
def alone(chain):
    """The chain; its site and environment are as before afterwards."""
    site, environment = chain.root / "config/sites/double.yaml", chain.environment
    text = site.read_text()
    yield chain
    site.write_text(text)
    chain.environment = environment


def changed(chain: ContainerChain, **parts: dict | list) -> None:
    """Change the site: a list is added to, a section updated."""
    path = chain.root / "config/sites/double.yaml"
    site = yaml.safe_load(path.read_text())
    for name, part in parts.items():
        site[name] = site[name] + part if isinstance(part, list) else site[name] | part
    path.write_text(yaml.safe_dump(site))


def test_the_script_for_vllm_of_an_image_runs_its_python_in_the_project(chain):
    """The script of docs/generated.md within a job's step, as Snakemake's plugin runs a shard."""
    (script,) = re.findall(r"```sh\n(#!.*?)```", (ROOT / "docs/generated.md").read_text(), flags=re.DOTALL)
    mounts = ",".join(yaml.safe_load((chain.root / "config/sites/double.yaml").read_text())["mounts"])
    for pattern, place in (
        (r"/lustre/images/\S+", chain.root / "train.sqsh"),
        ("/lustre:/lustre", mounts),
        (r"/opt/ray_venvs/\S+", sys.executable),
    ):
        script, count = re.subn(pattern, str(place), script)
        assert count == 1
    python = chain.root / "vllm-python"
    python.write_text(script)
    python.chmod(0o755)
    said = "import os; from scripts.sampling.sample import ENGINES; print(*ENGINES, os.environ['IMAGE_SAYS'])"
    step = shlex.join([*("srun", "--quiet", "--chdir", str(chain.root), str(python), "-c"), said])
    job = ["sbatch", "--wait", "--nodes=1", f"--output={chain.root}/said", f"--wrap={step}"]
    subprocess.run(job, env=chain.environment, check=True, capture_output=True)
    assert (chain.root / "said").read_text().split() == ["transformers", "vllm", "train"]


@pytest.mark.long
def test_a_container_of_another_image_is_refused_where_it_cannot_be_removed(alone, tmp_path):
    other = containers.make_image(tmp_path / "other.sqsh", says="other", PATH="/usr/bin:/usr/sbin")
    alone.cluster.run("srun", "--nodes=2", f"--container-image={other}", "--container-name=ray-head", "true")
    folders = alone.environment["PATH"].split(os.pathsep)
    alone.environment = alone.environment | {
        "PATH": os.pathsep.join(folders[1:])
    }  # pyxis finds enroot by slurmd's PATH
    output = alone.train_at_once("old", "grpo.seed=2")
    assert re.search(r"an old container; .*\n.*the container is of another image than .*/train.sqsh", output), output
    assert "to be continued" not in output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mounts": ["/none/such:/data"]}, "source path does not exist: /none/such"),
        (
            {"nemo_rl": {"images": {"train": "/none.sqsh", "sandbox": "/none.sqsh"}}},
            "No such file or directory: /none.sqsh",
        ),
    ],
)
def test_a_container_that_does_not_start_is_told_at_once_in_pyxis_words_and_not_tried_again(alone, change, says):
    changed(alone, **change)
    began = time.monotonic()
    output = alone.train_at_once(f"refused-{next(iter(change))}", f"grpo.seed={len(says)}")
    assert says in output and "NeMo-RL ended" in output, output
    assert "to be continued" not in output
    assert time.monotonic() - began < 120


def test_a_node_without_room_for_the_unpacked_image_is_told_before_ray_starts(alone):
    place = f"{containers.DATA}/data"
    alone.cluster.run("mount", "-t", "tmpfs", "-o", "size=100M", "tmpfs", place, host="node2")
    try:
        output = alone.train_at_once("full", "grpo.seed=3")
    finally:
        alone.cluster.run("umount", place, host="node2")
    assert re.search(
        r"error: node2: .*enroot's ENROOT_DATA_PATH, has 1\S* ?MB free, and .*train.sqsh takes 2\S* ?GB", output
    )


def test_ray_subs_containers_and_those_of_ended_jobs_are_removed_with_what_is_left_in_them(cluster, images):
    def tell(*live: str) -> str:
        return cluster.run("bash", SCRIPT, *live, host="node1")

    for name in ("ray-head", "other"):
        cluster.run(
            "srun", "--nodelist=node1", f"--container-image={images['IMAGE']}", f"--container-name={name}", "true"
        )
    for left in ("pyxis_71.0", "pyxis_72.3", "pyxis_72_ray-head"):
        cluster.run("mkdir", f"{containers.DATA}/data/{left}", host="node1")
    (place,) = places_of(tell())
    assert (place.host, place.folder, place.is_writable) == ("node1", f"{containers.DATA}/data", True)
    assert "pyxis_ray-head" in cluster.run("enroot", "list", host="node1"), "told alone removes nothing"
    daemon = "setsid sleep 4321 > /dev/null 2>&1 &"
    cluster.run("srun", "--nodelist=node1", "--container-name=ray-head", "sh", "-c", daemon)
    assert any("4321" in line for line in cluster.processes("node1")), "without cgroups it outlives its step"
    tell("0", "72")
    left = {*cluster.run("enroot", "list", host="node1").split()}
    assert left & {"pyxis_71.0", "pyxis_ray-head"} == set()
    assert left >= {"pyxis_72.3", "pyxis_72_ray-head", "pyxis_other"}
    assert not any("4321" in line for line in cluster.processes("node1"))
