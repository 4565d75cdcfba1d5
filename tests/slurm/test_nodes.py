"""A node made sick for real: the next submission leaves it out, or a spare takes its place at once."""

import re

import pytest
import yaml

pytest.importorskip("torch")

from scripts.stage.training_folder import TrainingFolder
from tests.conftest import Workflow
from tests.slurm.chain import Chain, make_base
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl_chain import STEPS, NemoRlChain

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def sick(possible, tmp_path_factory):
    """Three hosts; the shared memory of node2 is full."""
    with Cluster(tmp_path_factory.mktemp("sick"), pyxis=True) as cluster:
        fill(cluster)
        yield cluster


def fill(cluster: Cluster) -> None:
    """Leave node2 50 MB of shared memory, and fill them."""
    cluster.run("mount", "-o", "remount,size=50M", "/dev/shm", host="node2")  # noqa: S108
    cluster.run("fallocate", "-l", "49M", "/dev/shm/left_by_a_dead_job", host="node2")  # noqa: S108


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Workflow:
    """A tree in which all that the stage needs is there, and a few steps are enough."""
    tree = make_base(tmp_path_factory.mktemp("base"))
    tree.edit("max_num_steps: 80}", "max_num_steps: 10}")
    return tree


def test_a_sick_node_ends_the_attempt_before_ray_and_the_next_submission_goes_without_it(base, sick, tmp_path):
    with Chain(base, tmp_path, sick, nodes=2, sniff=True) as chain:
        chain.start()
        assert chain.end() == 0
        first, second = TrainingFolder(chain.run).attempts
        assert (first["outcome"], first["hosts"]) == ("sick", ["node1", "node2"])
        assert re.fullmatch(r"/dev/shm has \d MB free", first["sniff"]["sick"]["node2"])  # noqa: S108
        assert first["ended"] - first["time"] < 5
        assert (second["outcome"], second["hosts"]) == ("finished", ["node1", "node3"])
        assert second["step_seconds"] > 0 and second["sniff"]["seconds"] < 60
        assert chain.telling(r"node2 is sick: /dev/shm has .* left out of the next submission; trying again")
        assert chain.submitted() == 2
        status = chain.tree.run("python", "-m", "scripts.commands", "status").stdout
        assert "node2 is left out of the next submission, for a day: sick on " in status


def test_a_spare_takes_the_place_of_the_sick_node_which_goes_back_to_slurm(base, sick, tmp_path):
    with Chain(base, tmp_path, sick, nodes=2, spares=1, sniff=True) as chain:
        chain.start()
        assert chain.end() == 0
        (attempt,) = TrainingFolder(chain.run).attempts
        assert (attempt["outcome"], attempt["nodes"], attempt["hosts"]) == ("finished", 2, ["node1", "node3"])
        assert chain.submitted() == 1
        assert chain.jobs()[-1]["nodes"] == "node[1,3]"
        assert {log.stem for log in chain.directory.glob("logs/ray-*/ray-*.log")} == {"ray-node1", "ray-node3"}


def test_ray_sub_starts_its_steps_on_the_nodes_that_are_kept(sick, tmp_path):
    """The real ray.sub where STAGECOACH_NEMO_RL names a checkout, else the stand-in, with srun lines as the real one's."""
    chain = NemoRlChain(tmp_path, sick)
    site = chain.root / "config/sites/double.yaml"
    told = yaml.safe_load(site.read_text())
    told["slurm"] |= {"spares": 1, "sniff": True}
    site.write_text(yaml.safe_dump(told))
    chain.train("results/double/rlvr1/ckpt")
    (attempt,) = chain.attempts("rlvr1")
    assert (attempt["outcome"], attempt["to"], attempt["hosts"]) == ("finished", STEPS, ["node1", "node3"])
    assert {(it["name"], it["node"]) for it in chain.containers() if it["name"]} == {
        ("ray-head", "node1"),
        ("ray-worker", "node3"),
    }
    assert {it["node"] for it in chain.containers()} == {"node1", "node3"}
    assert chain.cluster.left_running() == []
