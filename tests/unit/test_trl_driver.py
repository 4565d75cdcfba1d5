"""What the driver says when training on several nodes fails: the cause, once."""

import socket

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from ray.train import ControllerError, WorkerGroupError

from scripts.backends.trl import driver as trl_driver
from scripts.backends.trl.driver import _explain
from scripts.backends.trl.worker import RankError
from scripts.errors import CutOffError, UserError

GLOO = RankError(0, "node1", "Traceback ...\nRuntimeError: [pair.cc:547] Connection closed by peer (gloo)\n", False)
FULL = RankError(1, "node2", "run: the disk is full; make room and start again", True)
ENDED_STATES = RuntimeError(
    "A worker health check failed.\n\tpid: 7\nThe actor died because its node has died. Node Id: ab. "
    "Some common causes include: (1) the process was killed by the OOM killer"
)


def said(failures, place) -> str:
    return str(_explain(WorkerGroupError("sixty lines", failures), place))


def test_a_mistake_is_told_as_it_is_with_its_rank_after_it(tmp_path):
    assert said({0: GLOO, 1: FULL}, tmp_path) == f"{FULL.text} (rank 1 on node2)"


def test_a_judge_that_did_not_answer_cuts_the_attempt_off(tmp_path):
    outage = RankError(1, "node2", "the genrm judge rm gave no answer", for_user=True, cut_off=True)
    error = _explain(WorkerGroupError("sixty lines", {0: GLOO, 1: outage}), tmp_path)
    assert isinstance(error, CutOffError) and str(error) == f"{outage.text} (rank 1 on node2)"
    assert not isinstance(_explain(WorkerGroupError("sixty lines", {1: FULL}), tmp_path), CutOffError)


def test_a_lost_rank_goes_before_the_connections_it_broke(tmp_path):
    (tmp_path / "rank_1").write_text("node2")
    expected = (
        "rank 1 on node2 is gone, killed or out of memory: The actor died because its node has died. Node Id: ab."
    )
    assert said({0: GLOO, 1: ENDED_STATES}, tmp_path) == expected
    assert said({0: ENDED_STATES}, tmp_path).startswith("rank 0 on an unknown host is gone")
    assert isinstance(_explain(WorkerGroupError("sixty lines", {0: GLOO, 1: ENDED_STATES}), tmp_path), CutOffError)


def test_any_other_failure_has_the_ranks_traceback_once(tmp_path):
    assert said({0: GLOO}, tmp_path) == f"rank 0 on node1 failed:\n{GLOO.text.rstrip()}"


def test_what_ray_train_itself_could_not_do_is_told(tmp_path):
    assert str(_explain(ControllerError(RuntimeError("no placement")), tmp_path)) == "Ray Train: no placement"


@pytest.mark.parametrize("address", ["", "auto", "taken"])
def test_a_cluster_that_does_not_answer_is_named_at_once(address):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}" if address == "taken" else address
        with pytest.raises(UserError, match=f"RAY_ADDRESS is '{address}': no Ray cluster answers there"):
            trl_driver._reach(address)
