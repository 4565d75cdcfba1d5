"""What the driver says when training on several nodes fails: the cause, once."""

from importlib.util import find_spec

import pytest

from scripts.errors import CutOffError, UserError

# Ray is imported by the tests that use it: the other process of pytest-xdist, which collects them too, need not wait.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="envs/trl.txt is not installed")

GLOO = (0, "node1", "Traceback ...\nRuntimeError: [pair.cc:547] Connection closed by peer (gloo)\n", False)
FULL = (1, "node2", "run: the disk is full; make room and start again", True)
GONE = RuntimeError(
    "A worker health check failed.\n\tpid: 7\nThe actor died because its node has died. Node Id: ab. "
    "Some common causes include: (1) the process was killed by the OOM killer"
)


def explained(failures, folder) -> UserError:
    """What is raised for the errors of these ranks; a tuple stands for a RankError of these arguments."""
    from ray.train import WorkerGroupError

    from scripts.backends.trl.driver import cause_of
    from scripts.backends.trl.rank_error import RankError

    errors = {rank: RankError(*told) if isinstance(told, tuple) else told for rank, told in failures.items()}
    return cause_of(WorkerGroupError("sixty lines", errors), folder)


def said(failures, folder) -> str:
    return str(explained(failures, folder))


@pytest.mark.slow
def test_a_mistake_is_told_as_it_is_with_its_rank_after_it(tmp_path):
    assert said({0: GLOO, 1: FULL}, tmp_path) == f"{FULL[2]} (rank 1 on node2)"


def test_a_server_that_did_not_answer_cuts_the_attempt_off(tmp_path):
    outage = (1, "node2", "the server of mcqa gave no answer", True, True)
    error = explained({0: GLOO, 1: outage}, tmp_path)
    assert isinstance(error, CutOffError) and str(error) == f"{outage[2]} (rank 1 on node2)"
    assert not isinstance(explained({1: FULL}, tmp_path), CutOffError)


def test_a_lost_rank_goes_before_the_connections_it_broke(tmp_path):
    (tmp_path / "rank_1").write_text("node2")
    expected = (
        "rank 1 on node2 is gone, killed or out of memory: The actor died because its node has died. Node Id: ab."
    )
    assert said({0: GLOO, 1: GONE}, tmp_path) == expected
    assert said({0: GONE}, tmp_path).startswith("rank 0 on an unknown host is gone")
    assert isinstance(explained({0: GLOO, 1: GONE}, tmp_path), CutOffError)


def test_any_other_failure_has_the_ranks_traceback_once(tmp_path):
    assert said({0: GLOO}, tmp_path) == f"rank 0 on node1 failed:\n{GLOO[2].rstrip()}"


def test_what_ray_train_itself_could_not_do_is_told(tmp_path):
    from ray.train import ControllerError

    from scripts.backends.trl.driver import cause_of

    found = cause_of(ControllerError(RuntimeError("no placement")), tmp_path)
    assert str(found) == "Ray: no placement" and isinstance(found, CutOffError)
