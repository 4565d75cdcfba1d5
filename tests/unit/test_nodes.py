"""Which nodes are called sick or slow, which the next submission leaves out, and what a node tells of itself."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from scripts.commands.project import Project
from scripts.commands.status import status_text
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Resources
from scripts.slurm import nodes as looking
from scripts.slurm import sniff
from scripts.slurm.client import Job
from scripts.slurm.nodes import Health, judge, look_at, without_spares
from scripts.slurm.resources import ARGUMENTS, training_resources
from scripts.stage.left_out import left_out
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT

NO_GPUS = {"gpus": 0, "ecc": 0, "throttled": 0, "xids": []}
WELL = NO_GPUS | {"disk_mb": 9e4, "shm_mb": 9e4, "product": 0.005, "copy": 0.05, "clock": 1001.9, "elapsed": 1.5}
GPUS = {"gpus": 8, "gpu_product": 0.002, "gpu_copy": 0.001}
SLURM = {"partition": "batch"}


def site(**slurm) -> Site:
    return Site(name="x", threads=1, slurm=SLURM | slurm)


def judged(has_gpus: bool = True, **other) -> tuple[dict, dict]:
    """The verdict on three nodes, the third with other measurements."""
    well = WELL | GPUS if has_gpus else WELL
    return verdict({"node1": well, "node2": well, "node3": well | other})


def verdict(answers: dict[str, dict]) -> tuple[dict, dict]:
    """The verdict on nodes of eight GPUs that were looked at for two seconds, from second 1000 on."""
    return judge(answers, 8, 1000.0, 2.0)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"gpus": 7}, "7 GPUs instead of 8"),
        ({"gpus": 0}, "0 GPUs instead of 8"),
        ({"ecc": 2}, "2 uncorrected ECC errors"),
        ({"xids": [79]}, "Xid 79 within a day"),
        ({"shm_mb": 12.3}, "/dev/shm has 12 MB free"),  # noqa: S108
        ({"clock": 1005.0}, "its clock is 3.0 s ahead"),
        ({"clock": 999.0}, "its clock is 2.5 s behind"),
        ({"gpu_product": 0.004}, "gpu_product 4.0 ms, the nodes' median 2.0 ms"),
        ({"copy": 0.3}, "copy 300.0 ms, the nodes' median 50.0 ms"),
    ],
)
def test_each_illness_is_told_with_its_figure(other, says):
    assert judged(**other) == ({"node3": says}, {})


def test_a_node_that_slows_the_rest_by_a_tenth_is_slow_and_one_without_a_driver_is_sick():
    assert judged() == ({}, {})
    assert judged(gpu_product=0.00219) == ({}, {})
    assert judged(gpu_product=0.00225) == ({}, {"node3": "gpu_product 2.2 ms, the nodes' median 2.0 ms"})
    assert judged(throttled=1) == ({}, {"node3": "a GPU is slowed by its hardware"})
    assert verdict({"node1": WELL | GPUS, "node2": WELL}) == ({"node2": "0 GPUs instead of 8"}, {})


def test_without_nvidia_smi_anywhere_and_with_as_little_room_everywhere_nothing_is_wrong():
    assert judged(has_gpus=False) == ({}, {})
    assert verdict({name: WELL | {"disk_mb": 500.0, "shm_mb": 64.0} for name in ("a", "b")}) == ({}, {})


def test_a_node_tells_of_itself_within_seconds_with_a_plain_python():
    line = subprocess.run([sys.executable, "-I", sniff.__file__, "--quick"], capture_output=True, check=True).stdout
    told = json.loads(line)
    assert told["disk_mb"] > 0 and abs(told["clock"] - time.time()) < 60 and "product" not in told
    assert sniff.best(lambda: time.sleep(0.01)) >= 0.01


def test_gpus_are_counted_by_nvidia_smi_and_only_hardwares_xids_of_a_day_count(tmp_path, monkeypatch):
    """The two programs' output is as their documents show it."""
    now = int(time.monotonic())
    xids = [(now, 79), (now, 31), (now - 2 * 86_400, 48)]
    lines = "\n".join(f"[{at}.5] NVRM: Xid (PCI:0000:3b:00): {number}, pid=7" for at, number in xids)
    for name, text in {"nvidia-smi": "0, Not Active\n1, Active\n[N/A], Not Active", "dmesg": lines}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sniff.gpus() == {"gpus": 3, "ecc": 1, "throttled": 1, "xids": [79]}


def told_by(monkeypatch, script: str) -> Health:
    """What is made of two nodes whose step is a shell's script."""
    monkeypatch.setattr(looking, "step_command", lambda *_: ["sh", "-c", script])
    return look_at(Job("7", "RUNNING", ("node1", "node2"), None, 16, False, 0), site().slurm)


def line_of(node: str, **more) -> str:
    return f"echo '{json.dumps(WELL | {'node': node, 'elapsed': 0.0, 'clock': time.time() + 0.5, **more})}'"


def test_a_silent_node_is_sick_and_where_most_are_silent_nothing_is_known(monkeypatch, capsys):
    monkeypatch.setattr(looking, "LONGEST", 1)
    assert told_by(monkeypatch, f"{line_of('node1')}; sleep 60").sick == {"node2": "no answer within 1 s"}
    failed = "srun: error: Task launch for StepId=1.2 failed on node node2: Connection refused"
    assert told_by(monkeypatch, f"echo '{failed}'; exit 1").sick == {
        "node2": "Slurm starts nothing there: Connection refused"
    }
    assert told_by(monkeypatch, "echo srun: no such option; exit 1").sick == {}
    assert "warning: the nodes were not looked at: srun: no such option" in capsys.readouterr().err


def test_where_all_nodes_are_sick_the_site_is_named_instead(monkeypatch):
    lines = "; ".join(line_of(node, gpus=4) for node in ("node1", "node2"))
    with pytest.raises(UserError, match=r"all nodes are sick; node1: 4 GPUs instead of 8.*set slurm.sniff: false"):
        told_by(monkeypatch, lines)


def test_spares_go_back_sick_ones_first_and_the_first_node_stays(monkeypatch):
    asked = []
    monkeypatch.setattr(looking, "run_client", lambda command, _: asked.append(command[-1]))
    monkeypatch.setattr(looking, "job_of", lambda job: None)
    job = Job("7", "RUNNING", ("n1", "n2", "n3", "n4"), None, 16, False, 0)
    for health in (Health({}, {}, 0.0), Health({"n1": ""}, {"n2": ""}, 0.0), Health({"n2": ""}, {"n3": ""}, 0.0)):
        without_spares(job, health, 2)
    assert asked == [f"ReqNodeList={kept}" for kept in ("n1,n2", "n1,n3", "n1,n4")]
    assert without_spares(job, Health({}, {}, 0.0), 4) is job


def test_a_training_asks_for_spares_and_not_for_nodes_that_are_left_out():
    here = site(spares=2, arguments={"exclude": "node[07-09]"})
    asked = training_resources(here, Resources(nodes=4), away={"node2": "sick"})
    assert asked["nodes"] == 6
    assert asked[ARGUMENTS] == "'--exclude=node[07-09],node2'"
    assert training_resources(here, Resources(nodes=1))["nodes"] == 1


def noted(root, outcome: str, *hosts: str, ago: float = 0, store: str = "a", blamed=(), **health) -> None:
    """Note an attempt, some hours ago."""
    run = root / "store" / store
    run.mkdir(parents=True, exist_ok=True)
    TrainingFolder(run).begin_attempt(
        0, 3, nodes=len(hosts), hosts=hosts, sniff={"sick": {}, "slow": {}, "seconds": 2.0} | health
    )
    TrainingFolder(run).end_attempt(0, outcome, blamed)
    path = run / "attempts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-2]["time"] -= 3600 * ago
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sick_or_slow_node_is_left_out_for_a_day_by_whichever_stage_it_was_found(tmp_path):
    noted(tmp_path, "sick", "n1", "n2", ago=2, sick={"n2": "no room"})
    noted(tmp_path, "finished", "n1", "n3", store="b", slow={"n3": "gpu_copy"})
    noted(tmp_path, "sick", "n1", "n4", ago=25, sick={"n4": "no answer"})
    at = [time.strftime("%m-%d %H:%M", time.localtime(time.time() - 3600 * ago)) for ago in (2, 0)]
    assert left_out(tmp_path) == {"n2": f"sick on {at[0]}: no room", "n3": f"slow on {at[1]}: gpu_copy"}


def test_a_node_that_failed_two_attempts_is_left_out_unless_it_did_well_since_or_the_user_failed(tmp_path):
    noted(tmp_path, "lost", "n1", ago=3)
    assert left_out(tmp_path) == {}
    noted(tmp_path, "failed", "n1")  # for a reason of its own
    noted(tmp_path, "stalled", "n1", store="b")
    assert left_out(tmp_path) == {"n1": "failed 2 attempts"}
    noted(tmp_path, "unfinished", "n1")
    assert left_out(tmp_path) == {}


def test_of_attempts_on_several_nodes_the_named_or_the_common_node_is_left_out(tmp_path):
    for _ in range(2):
        noted(tmp_path, "lost", "n1", "n2", ago=2)
    assert left_out(tmp_path) == {}, "either may be sick"
    noted(tmp_path, "lost", "n2", "n3", "n4", ago=1)
    assert left_out(tmp_path) == {}, "n1 has not done well since"
    noted(tmp_path, "finished", "n1", "n5")
    assert list(left_out(tmp_path)) == ["n2"]
    for _ in range(2):
        noted(tmp_path, "lost", "n6", "n7", blamed=["n7"])
    assert [*left_out(tmp_path)] == ["n2", "n7"]


def test_old_records_name_no_nodes_and_a_sick_node_is_no_lack_of_progress(tmp_path):
    run = tmp_path / "store/a"
    noted(tmp_path, "lost", "n1")
    noted(tmp_path, "sick", "n1", "n2", sick={"n2": "clock"})
    assert TrainingFolder(run).without_progress(3, 0) is None
    old = [{"event": "begin", "step": 0, "time": 1.0, "host": "n1"}, {"event": "end", "step": 3, "time": time.time()}]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert left_out(tmp_path) == {}
    assert TrainingFolder(run).attempts[0]["to"] == 3


def test_an_attempt_has_the_median_seconds_of_its_own_steps(tmp_path):
    def log(**seconds: float) -> None:
        lines = (json.dumps({"step": int(step[1:]), "seconds": value}) for step, value in seconds.items())
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    for start, told in ((0, {"s1": 9.0, "s2": 9.0, "s3": 7.0}), (1, {"s2": 2.0, "s3": 4.0, "s4": 3.0}), (4, {})):
        TrainingFolder(tmp_path).begin_attempt(start)
        log(**told)
        TrainingFolder(tmp_path).end_attempt(start + len(told), "lost")
    assert [attempt["step_seconds"] for attempt in TrainingFolder(tmp_path).attempts][:2] == [9.0, 3.0]
    assert TrainingFolder(tmp_path).attempts[2]["step_seconds"] is None


def test_status_names_the_nodes_that_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noted(tmp_path / "results", "sick", "n1", "n2", sick={"n2": "no answer within 60 s"})
    recipe = load_recipe(ROOT / "config/recipes/tiny.yaml")
    told = status_text(Project(recipe, site(), tmp_path / "results/tiny", root=tmp_path / "results"))
    assert re.search(r"n2 is left out of the next submission, for a day: sick on .{11}: no answer within 60 s$", told)
