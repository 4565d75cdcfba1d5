"""TRL, Super's rlvr1 and rlvr2 by NeMo-RL's own code, TRL: through Snakemake and Slurm, rlvr1 interrupted twice.

Real are Slurm, Snakemake, Stagecoach, the release's ray.sub, Ray over two hosts, driver, config, loop, data loader, replay
buffer, loss, checkpoints and logger, Gym with its servers, and the converter of the export. Not real: the containers (a
plugin runs their steps on the host), the GPUs, and policy and generator, which are classes for a CPU (tests/nemo_rl/cpu).
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from scripts.stage.training_folder import TrainingFolder
from tests.production import CHECKOUTS, PYTHON, needs_nemo_rl
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl_real import BATCHES, PROMPTS, RealChain, image_of

REPORT = os.environ.get("STAGECOACH_CHAIN_REPORT")
STAGES = ("rlvr1", "rlvr2")
PLANNED = BATCHES - 2
PATIENCE = 1200.0

pytestmark = needs_nemo_rl


@pytest.fixture(scope="module")
def chain(possible, tmp_path_factory):
    """All stages published; rlvr1's driver was killed in the save of step 3, then its job put back into the queue."""
    python = Path(PYTHON).absolute()
    with Cluster(tmp_path_factory.mktemp("real"), hosts=2, pyxis=True, image=image_of(python)) as cluster:
        chain = RealChain(tmp_path_factory.mktemp("chain"), cluster, Path(CHECKOUTS).resolve(), python)
        with ThreadPoolExecutor() as pool:
            call = pool.submit(chain.train, "results/real/dpo/gate.json", check=False)
            requeue_after(chain, 5, call.done)
            chain.output = call.result()
        if REPORT:
            Path(REPORT).write_text(json.dumps({stage: told_of(chain, stage) for stage in STAGES}))
        yield chain


def told_of(chain: RealChain, stage: str) -> dict[str, Any]:
    """What benchmarks/real_chain.py reads of a stage."""
    reach, record = chain.results / stage / "run/reach.json", chain.results / stage / "ckpt/record.json"
    noted = json.loads(reach.read_text()) if reach.exists() else {}
    published = json.loads(record.read_text()) if record.exists() else None
    return {"attempts": chain.attempts(stage), "planned": PLANNED, "reach": noted, "record": published}


def trained(chain: RealChain, stage: str) -> list[dict[str, Any]]:
    """The attempts that made a step: the loader's worker, forked from a process of threads, stands still now and then."""
    return [it for it in chain.attempts(stage) if it["to"] > it["from"]]


def requeue_after(chain: RealChain, step: int, is_over: Callable[[], bool]) -> None:
    """Put rlvr1's job back into the queue once it has sealed a checkpoint of this step."""
    run, deadline = chain.results / "rlvr1/run", time.monotonic() + PATIENCE
    while not (run.exists() and any(it.step >= step for it in TrainingFolder(run).checkpoints)):
        if is_over() or time.monotonic() > deadline:
            return
        time.sleep(0.2)
    (job,) = chain.cluster.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").split()
    chain.cluster.run("scontrol", "requeue", job)


def test_both_stages_are_published(chain):
    for stage in STAGES:
        assert (chain.results / stage / "ckpt/record.json").exists(), chain.output
        assert (chain.results / stage / "ckpt/weights/policy/weights/.metadata").is_file()


def test_the_first_goes_on_after_a_kill_in_a_save_and_after_a_requeue(chain):
    first, second, *stalled, last = trained(chain, "rlvr1")  # the loader may stand still after some steps, too
    assert (first["from"], second["from"]) == (0, 2), "step 3 was not whole"
    assert all(before["to"] == after["from"] >= 5 for before, after in pairwise([second, *stalled, last]))
    assert [it["outcome"] for it in (first, second, last)] == ["lost", "unfinished", "finished"]
    assert {it["outcome"] for it in stalled} <= {"stalled"}
    assert "driver was killed (status 137) after the checkpoint of step 2; to be continued" in chain.log("rlvr1")


def test_it_ends_where_its_rows_do_and_the_record_counts_what_was_skipped(chain):
    records = [json.loads((chain.results / stage / "ckpt/record.json").read_text()) for stage in STAGES]
    assert records[1]["step"] == PLANNED and "data_ended" not in records[1]
    ended, step = records[0]["data_ended"], records[0]["step"]
    assert 5 < step < PLANNED
    assert (ended["planned"], ended["rows_skipped"]) == (PLANNED, (PLANNED - step) * PROMPTS)
    assert [line["step"] for line in chain.steps("rlvr1")][-1] == step
    for stage in STAGES:
        table = pd.read_parquet(chain.results / stage / "metrics.parquet")
        assert list(table["step"]) == list(range(1, len(table) + 1))
        assert table["reward_mean"].between(0, 1).all() and table["reward_mean"].nunique() > 1


def test_the_second_starts_from_what_the_releases_converter_made_of_the_first(chain):
    record = json.loads((chain.results / "rlvr1/hf/record.json").read_text())
    model = (chain.results / "rlvr1/hf/model").resolve()
    assert model.name == record["content"]
    assert "Saved HF checkpoint to" in (chain.results / "rlvr1/logs/converter.log").read_text()
    for command in (chain.results / "rlvr2/logs").glob("*-logs/driver_command.sh"):
        assert f"policy.model_name={model}" in command.read_text()


def test_trl_goes_on_from_what_nemo_rl_learnt_on_what_trl_had_learnt(chain):
    places = (*(f"{stage}/hf/model" for stage in ("sft", *STAGES)), "dpo/ckpt/weights")
    models = [load_file(chain.results / place / "model.safetensors") for place in places]
    for before, after in pairwise(models):
        assert {name: tensor.shape for name, tensor in after.items()} == {name: it.shape for name, it in before.items()}
        changed = [float((after[name].float() - before[name].float()).abs().max()) for name in before]
        assert 0 < max(changed) < 0.1, "it was trained a little, not made anew"
    first = (chain.results / "sft/hf/model").resolve()
    commands = [path.read_text() for path in (chain.results / "rlvr1/logs").glob("*-logs/driver_command.sh")]
    assert commands and all(f"policy.model_name={first}" in command for command in commands)


def test_nothing_is_left_running(chain):
    assert chain.cluster.left_running() == []
