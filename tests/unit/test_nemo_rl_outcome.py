"""How a driver of NeMo-RL ended is read off its logs, since its exit status says little."""

import os
import re
from pathlib import Path

import pytest

from scripts.backends.nemo_rl.outcome import HOPELESS, SHOWN, SIGNS, cause_of, data_ended
from tests.cases import cases, tables_of
from tests.production import CHECKOUTS, TRIED, needs_checkouts

STEP = ["========== Step 3/50 ==========", "  Loss: 0.0123", "  Mean reward: 0.41"]


@pytest.fixture
def logs(tmp_path):
    """Writes the driver's and ray.sub's logs; gives the cause that they tell."""

    def told(driver: list[str] | None, cluster: list[str]):
        log = tmp_path / "ray-driver.log"
        (tmp_path / "ray-sub.log").write_text("".join(f"{line}\n" for line in cluster))
        if driver is not None:
            log.write_text("".join(f"{line}\n" for line in driver))
        return cause_of(log if driver is not None else None, tmp_path / "ray-sub.log", tmp_path)

    return told


def test_the_script_that_ray_sub_prints_as_it_runs_is_no_message_of_its(logs):
    trace = ["+ srun --nodes=2 bash -x -c 'set -o pipefail", "  if (( SECONDS > DEADLINE )); then"]
    trace += ['    echo "[ERROR] Timed out waiting for all workers to connect ($units/16)"', "  fi'"]
    trace += [
        "+ echo '[ERROR] Background srun ray-workers exited'",
        "srun: error: node1: task 0: Exited with exit code 137",
    ]
    assert logs(STEP, trace) is None
    assert logs(STEP, [*trace, "[ERROR] Timed out waiting for all workers to connect (8/16)"]).kind == "lost"


@needs_checkouts
@pytest.mark.parametrize("release", TRIED)
def test_nothing_that_a_releases_ray_sub_may_print_of_itself_is_a_cause(logs, release):
    assert logs(STEP, Path(CHECKOUTS, release, "ray.sub").read_text().splitlines()) is None


def test_every_sign_is_tried_here():
    tables = tables_of("nemo_rl_outcome")
    assert all(len(tables[log]) == len(SIGNS[log]) for log in ("driver", "container", "cluster"))
    shown = [row[0] for row in tables["judges"].values()]
    assert all(any(re.search(sign["pattern"], line) for line in shown) for sign in SIGNS["judges"])


@cases("nemo_rl_outcome.driver", "line", "kind", "what")
def test_each_sign_in_the_drivers_log_is_read(logs, line, kind, what):
    cause = logs([*STEP, line, "the end"], ["all nodes joined"])
    assert (cause.kind, cause.log.name) == (kind, "ray-driver.log")
    assert cause.what.startswith(what)
    assert line in cause.lines and len(cause.lines) <= SHOWN


@cases("nemo_rl_outcome.container", "line", "kind", "what")
@pytest.mark.parametrize("step", ["ray-head.log", "ray-worker-1.log", "sandbox/sandbox-0.log"])
def test_pyxis_words_in_a_job_steps_log_come_before_ray_subs(logs, tmp_path, step, line, kind, what):
    (tmp_path / step).parent.mkdir(exist_ok=True)
    (tmp_path / step).write_text(f"slurmstepd-node1: error: pyxis: printing enroot log file:\n{line}\nthe end\n")
    cause = logs(None, ["Background srun 'ray-head' (pid 71) died early"])
    assert (cause.kind, cause.log, cause.lines[-1]) == (kind, tmp_path / step, line)
    assert cause.what.startswith(what)


@cases("nemo_rl_outcome.cluster", "line", "kind", "what")
def test_each_sign_in_the_clusters_log_is_read(logs, line, kind, what):
    cause = logs(None, ["starting", line])
    assert (cause.kind, cause.log.name, cause.lines) == (kind, "ray-sub.log", ("starting", line))
    assert cause.what.startswith(what)


@cases("nemo_rl_outcome.judges", "line", "kind", "what")
def test_a_judges_end_counts_more_than_what_the_driver_made_of_it(logs, line, kind, what):
    cause = logs([*STEP, "Traceback (most recent call last):", "ConnectionError: 502"], ["starting", line])
    assert (cause.kind, cause.log.name, cause.lines[0]) == (kind, "ray-sub.log", line)
    assert cause.what.startswith(what)


def test_a_judges_end_is_told_with_its_node_and_last_words_though_the_driver_ended_first(logs, tmp_path):
    pool = tmp_path / "external_judge_genrm"
    pool.mkdir()
    (pool / "vllm_1.log").write_text("loading\ntorch.OutOfMemoryError\n")
    (pool / "replica_1_0.log").write_text("[12-judge_genrm-1] ERROR: vLLM exited with status 137\n")
    started = ["[INFO] genrm replica 0: node3", "[INFO] genrm replica 1: node4", "[INFO] genrm ready: 2/2"]
    cause = logs([*STEP, "Traceback (most recent call last):"], started)
    assert (cause.kind, cause.lines[1:]) == ("lost", (started[1], f"{pool / 'vllm_1.log'}: torch.OutOfMemoryError"))


def test_pools_that_were_not_up_in_time_are_named_with_their_logs(logs, tmp_path):
    told = ["[INFO] genrm ready: 0/2", "[INFO] safety ready: 1/1", "[INFO] genrm ready: 1/2"]
    cause = logs(None, [*told, "[FATAL] Timed out waiting for all external vLLM pools"])
    assert cause.lines[1:] == (f"[INFO] genrm ready: 1/2; see {tmp_path / 'external_judge_genrm'}",)


def test_only_failures_that_a_driver_survives_for_nothing_end_it_at_once():
    driver = tables_of("nemo_rl_outcome")["driver"]
    lines = {name: row[0] if isinstance(row, list) else row["line"] for name, row in driver.items()}
    assert {name for name, line in lines.items() if HOPELESS.search(line)} == {"import", "collector"}


@needs_checkouts
@pytest.mark.parametrize("release", TRIED)
def test_every_release_prints_the_sign_of_a_failed_thread_of_rollouts_and_goes_on(release):
    (text,) = [
        text
        for path in Path(CHECKOUTS, release, "nemo_rl/algorithms").rglob("*.py")
        if "def _collection_loop" in (text := path.read_text())
    ]
    (handler,) = re.findall(
        r"\n        except Exception as e:\n((?: {12}.*\n|\n)+)", text.partition("_collection_loop(self")[2]
    )[:1]
    assert HOPELESS.search(re.search(r'print\(f"(.*)\{e\}"\)', handler)[1])
    assert "raise" not in handler


def test_logs_that_bear_no_sign_give_no_cause(logs):
    assert logs([*STEP, "Max number of steps has been reached"], ["pyxis: imported; completed without error"]) is None


def test_the_drivers_own_word_counts_more_than_the_clusters(logs):
    assert logs(["No space left on device"], ["srun: error: Node failure on node7"]).what.startswith("the disk is full")


def test_a_reason_counts_more_than_the_traceback_that_carries_it(logs):
    traceback = ["Traceback (most recent call last):", '  File "grpo.py", line 7, in train']
    ended = tables_of("nemo_rl_outcome")["driver"]["rows"]["line"]
    assert logs([*STEP, *traceback, ended], []).what.startswith("the data ended")
    failed = ended.replace("'errored': False", "'errored': True")
    assert logs([*STEP, *traceback, failed], []).kind == "failed", "its collector failed, which the same words say"


def test_of_a_traceback_the_end_is_shown(logs):
    log = ["Traceback (most recent call last):", *(f'  File "x.py", line {n}' for n in range(9)), "ValueError: bad"]
    cause = logs(log, [])
    assert cause.lines[-1] == "ValueError: bad" and len(cause.lines) == SHOWN


def test_a_step_of_the_cluster_that_ended_first_is_named(logs, tmp_path):
    for age, name in ((5, "ray-worker-000.log"), (60, "ray-worker-001.log"), (90, "ray-worker-002.log")):
        (tmp_path / name).write_text("" if age == 90 else f"{name}: ray stopped\n")
        os.utime(tmp_path / name, (1_000_000 - age,) * 2)
    assert logs(STEP, ["running"]) is None
    (tmp_path / "ENDED").touch()
    cause = logs(STEP, ["running"])
    name = "ray-worker-001.log"
    assert (cause.kind, cause.log.name, cause.lines) == ("lost", name, (f"{name}: ray stopped",))


def test_where_no_step_of_the_cluster_wrote_anything_its_own_log_is_shown(logs, tmp_path):
    (tmp_path / "ENDED").touch()
    assert logs(None, ["bringing up"]).lines == ("bringing up",)


@cases("nemo_rl_outcome.ended", "lines", "ended")
def test_the_data_have_ended_where_the_generating_thread_says_so_however_long_ago(tmp_path, lines, ended):
    log = tmp_path / "ray-driver.log"
    log.write_text("\n".join([*lines, *["  waiting..."] * 200_000]))
    assert data_ended(log) is ended
