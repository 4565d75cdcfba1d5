"""NVIDIA's own pyxis and enroot: what they do of srun's options, and a stage of NeMo-RL's stand-in in real containers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
    assert all(names == {"pyxis_mine"} for names in left.values()), left
