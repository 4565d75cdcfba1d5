"""The doubles of what NeMo-RL's launchers meet: containers on a Slurm, its checkout, its driver and its converters."""

import json

import pytest

from tests.slurm.cluster import Cluster, ClusterError


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
        (["--container-image=a/b:1", "--container-mounts=/usr:/x,/none:/y"], "No such file or directory: /none"),
        (["--container-image=a/b:1", "--container-workdir=/none"], "couldn't chdir to /none"),
    ],
)
def test_a_step_fails_without_its_image_mount_or_directory(pyxis, options, message):
    with pytest.raises(ClusterError, match=rf"ended with 1: (.|\n)*pyxis: .*{message}"):
        pyxis.run("srun", *options, "true")


def test_a_batch_script_takes_the_options_too(pyxis, tmp_path):
    options = ("--container-image=a/b:1", f"--container-workdir={tmp_path}", "--container-remap-root")
    pyxis.run("sbatch", "--wait", f"--output={tmp_path}/out", *options, "--wrap=pwd")
    assert (tmp_path / "out").read_text().splitlines() == [str(tmp_path)]
    assert [(record["step"], record["remap_root"]) for record in containers(pyxis)[-1:]] == [("batch", True)]


def test_without_an_image_nothing_is_recorded(pyxis):
    before = containers(pyxis)
    pyxis.run("srun", "--container-workdir=/none", "true")
    assert containers(pyxis) == before
