"""A chain of TRL, NeMo-RL and TRL again; and what becomes of each odd end of NeMo-RL's driver.

Containers are doubled by a plugin of Slurm's that runs their steps on the host, and the driver by a stand-in with the
files, lines and ends of the real one; Slurm, Snakemake, Ray and all of Stagecoach are real.
"""

import json
import re

import pandas as pd
import pytest
import yaml

from scripts.model.hugging_face import tensors_of
from scripts.rows.chat_format import ChatFormat
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl_chain import AGENTS, PROMPTS, STEPS, NemoRlChain

STAGES = {"sft": 2, "rlvr1": STEPS, "dpo": 2}
SECRET = "hf-token-that-nobody-may-see"  # noqa: S105


@pytest.fixture(scope="module")
def chain(possible, tmp_path_factory):
    """A tree in which `snakemake --profile profiles/slurm` has trained dpo and its ancestors; tokens in the environment."""
    with Cluster(tmp_path_factory.mktemp("pyxis"), hosts=2, pyxis=True) as cluster:
        chain = NemoRlChain(tmp_path_factory.mktemp("nemo-rl"), cluster)
        chain.environment = chain.environment | {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
        chain.output = chain.train("results/double/dpo/gate.json")
        yield chain


def test_each_stage_is_trained_by_its_backend_from_what_the_one_before_exported(chain):
    parent = []
    for stage, step in STAGES.items():
        (attempt,) = chain.attempts(stage)
        assert (attempt["outcome"], attempt["to"], attempt["nodes"]) == ("finished", step, 1 + (stage == "rlvr1"))
        record = json.loads((chain.results / stage / "ckpt/record.json").read_text())
        assert (record["step"], [it["content"] for it in record["parents"]]) == (step, parent)
        parent = [(chain.results / stage / "hf/model").resolve().name]
    assert (chain.results / "rlvr1/ckpt/weights/training_info.json").is_file()


def test_names_shapes_and_chat_format_stay_from_backend_to_backend_and_weights_change(chain):
    first, *others = (chain.results / place for place in ("sft/hf/model", "rlvr1/hf/model", "dpo/ckpt/weights"))
    for model in others:
        shapes, wanted = ({name: shape for name, (_, shape) in tensors_of(it).items()} for it in (model, first))
        assert shapes == wanted
        assert ChatFormat.of(first).changes(ChatFormat.of(model)) == []
    weights = [b"".join(path.read_bytes() for path in model.glob("*.safetensors")) for model in (first, *others)]
    assert len(set(weights)) == 3
    command = next((chain.results / "rlvr1/logs").glob("*-logs/driver_command.sh")).read_text()
    assert f"policy.model_name={first.resolve()}" in command
    assert f"grpo.max_num_steps={STEPS}" in command
    assert "logger.tensorboard_enabled=true" in command


@pytest.mark.long
def test_a_stage_of_the_other_backend_is_stale_with_what_it_starts_from_and_not_with_what_follows(chain):
    recipe, told = chain.root / "config/recipes/double.yaml", ("--profile", "profiles/slurm", "results/double/dpo/ckpt")
    as_trained = recipe.read_text()
    for changed, stale in (("sft", {"sft", "rlvr1", "dpo"}), ("rlvr1", {"rlvr1", "dpo"})):
        other = yaml.safe_load(as_trained)
        other["stages"][changed]["seed"] = 5
        recipe.write_text(yaml.safe_dump(other))
        assert chain.planned(*told) == stale
    recipe.write_text(as_trained)
    assert "Nothing to be done" in chain.snakemake("--dry-run", *told)


def test_a_lineage_goes_through_both_backends(chain):
    output = chain.run("python", "-m", "scripts.commands", "lineage", "results/double/dpo/ckpt").stdout
    assert "files are as recorded" in output
    for stage in STAGES:
        assert stage in output


def test_every_step_ran_in_its_container_with_the_mounts_of_the_site(chain):
    asked = chain.containers()
    images = {record["image"] for record in asked}
    assert images == {str(chain.root / "train.sqsh"), str(chain.root / "sandbox.sqsh")}
    heads = [record for record in asked if record["name"] == "ray-head"]
    converters = [record for record in asked if record["image"].endswith("train.sqsh") and not record["name"]]
    assert (len(heads), len(converters)) == (1, 1)
    for record in [*heads, *converters]:
        assert record["workdir"] == str(chain.checkout)
        assert f"{chain.root}:{chain.root}" in record["mounts"].split(",")
        assert (
            f"{chain.checkout}/3rdparty/Gym-workspace/Gym:/opt/nemo-rl/3rdparty/Gym-workspace/Gym" in record["mounts"]
        )
    assert chain.cluster.left_running() == []


def test_metrics_have_the_columns_of_every_backend_and_no_kl_where_none_was_measured(chain):
    table = pd.read_parquet(chain.results / "rlvr1/metrics.parquet")
    assert list(table["step"]) == list(range(1, STEPS + 1))
    assert table["kl"].isna().all()
    for column in ("reward_mean", "reward_std", "response_length_mean", "gen_kl_error", "entropy", "lr", "seconds"):
        assert table[column].notna().all(), column
    for column in ("mismatch_share", "waiting_share", "training_share", "weights_share"):
        assert table[column].between(0, 1).all(), column
    assert set(dict(table["environment_rewards"][0])) == set(AGENTS)


def test_no_token_is_in_any_file_or_output(chain):
    assert SECRET not in chain.output
    for path in [
        *chain.results.rglob("*"),
        *(chain.root / ".snakemake").rglob("*"),
        *chain.cluster.directory.glob("*"),
    ]:
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in json.dumps(chain.containers())


def test_a_driver_killed_while_saving_goes_on_to_the_same_weights(chain):
    synchronous, once = "grpo.async_grpo.enabled=false", f"++stand_in.once={chain.root}/struck"
    output = chain.train_at_once("killed", synchronous, "++stand_in.fault=die", "++stand_in.at=4", once)
    assert re.search(r"driver was killed \(status 137\) after the checkpoint of step 2; to be continued", output)
    output = chain.train_at_once("killed", fresh=False)
    assert "resumes from step 2" in output
    assert f"(step {STEPS})" in output
    published = chain.results.with_name("killed") / "rlvr1/ckpt/weights/policy/weights/iter_0000000"
    assert b"".join(path.read_bytes() for path in sorted(published.glob("*.distcp"))) == chain.weights("rlvr1")


@pytest.mark.long
def test_a_deadline_ends_an_attempt_with_its_step_saved(chain):
    """A machine on which Ray is up only after the deadline is given more time, or there is no step to save."""
    for deadline in (70, 140):
        output = chain.train_at_once(f"deadline{deadline}", "++stand_in.step_seconds=10", deadline=deadline)
        if "unfinished at step 0" not in output:
            break
    assert re.search(
        r"unfinished at step [1-5] of 6 \(its deadline came; it saved and stopped\); to be continued", output
    )


@pytest.mark.long
def test_a_driver_that_makes_no_new_step_is_ended(chain):
    chain.write_site(stall_seconds=15, startup_seconds=90)
    output = chain.train_at_once("stalled", "++stand_in.fault=hang", "++stand_in.at=4")
    assert re.search(r"no new step for 15 s \(site's nemo_rl.stall_seconds\), at step 2; see .*ray-driver.log", output)
    assert chain.cluster.left_running() == []


@pytest.mark.long
def test_a_chain_interrupted_twice_is_published_and_says_what_was_skipped(chain):
    chain.write_site()
    struck = chain.root / "struck_again"
    output = chain.train_at_once("twice", "++stand_in.fault=die", "++stand_in.at=3", f"++stand_in.once={struck}")
    assert "after the checkpoint of step 2; to be continued" in output
    struck.unlink()
    chain.train_at_once("twice", fresh=False)
    chain.train("--config", "recipe=config/recipes/twice.yaml", "run=twice", "--", "results/twice/tuned/ckpt")
    first, second = (
        json.loads((chain.root / f"results/twice/{stage}/ckpt/record.json").read_text()) for stage in ("rlvr1", "tuned")
    )
    assert second["step"] == 2 and "data_ended" not in second
    ended, skipped = first["data_ended"], (STEPS - first["step"]) * PROMPTS
    assert 2 <= first["step"] < STEPS
    assert (ended["planned"], ended["rows_skipped"]) == (STEPS, skipped)
    assert second["parents"][0]["data_ended"] == ended
    log = (chain.root / "results/twice/rlvr1/logs/attempts.log").read_text()
    assert f"(step {first['step']} of {STEPS}, {skipped} rows skipped" in log
