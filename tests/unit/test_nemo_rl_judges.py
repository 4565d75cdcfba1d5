"""Judges outside NeMo-RL's Ray cluster: what a recipe may say, what is part of the identity, what starts and asks them."""

import json
import re
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.places import any_launch, check_judges
from scripts.backends.nemo_rl.command import (
    FIRST_PORT,
    START_POOLS,
    ask_addresses,
    cluster_environment,
    hydra_overrides,
    pool_environment,
)
from scripts.backends.nemo_rl.runtime import Runtime, runtime_of
from scripts.backends.nemo_rl.train import slurm_variables
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site, Slurm
from scripts.slurm.client import Job
from scripts.stage.estimate import estimate
from scripts.stage.stage import Stage
from tests.cases import cases, tables_of
from tests.conftest import ROOT
from tests.production import CHECKOUTS, needs_checkouts

MADE = tables_of("nemo_rl_judges")
LOGS = Path("/lustre/results/rl/logs")
JOB = Job("7", "RUNNING", ("n1", "n2"), None, 64, requeues=True, restarts=0, partition="batch", beside=("n3", "n4"))


@pytest.fixture
def made(tmp_path):
    """A recipe whose stage rl has judges; `changes` to genrm, None for a key to be left out, `stage` to the stage."""

    def load(changes: dict | None = None, release: str = "main", **stage: object) -> Recipe:
        genrm = MADE["judges"]["genrm"] | (changes or {})
        judges = MADE["judges"] | {"genrm": {key: value for key, value in genrm.items() if value is not None}}
        stages = {"rl": MADE["recipe"]["stages"]["rl"] | {"judges": judges} | stage}
        (tmp_path / "made.yaml").write_text(yaml.safe_dump(MADE["recipe"] | {"release": release, "stages": stages}))
        return load_recipe(tmp_path / "made.yaml")

    return load


def site(
    checkout: str = "/lustre/code/main", mounts: tuple[str, ...] = ("/lustre:/lustre",), **environment: str
) -> Site:
    nemo_rl = NemoRlSite(checkouts={"main": checkout}, images={"train": "/lustre/train.sqsh"}, cache="/lustre/cache")
    slurm = Slurm(partition="batch", gpus_per_node=4)
    return Site(name="x", threads=1, slurm=slurm, nemo_rl=nemo_rl, mounts=list(mounts), environment=environment)


@cases("nemo_rl_judges.refused", "changes", "says")
def test_what_does_not_fit_is_refused_with_its_key_and_no_secret_is_repeated(made, changes, says):
    with pytest.raises(UserError) as refused:
        made(changes)
    assert says in str(refused.value) and "stages.rl" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_release_without_the_tools_is_refused_with_the_name_of_one_that_has_them(made):
    with pytest.raises(
        UserError, match=r"stages\.rl\.judges: v0\.7\.0 has no judges outside .*; name release main, or"
    ):
        made(release="v0.7.0")


def test_a_driver_without_gym_has_nobody_who_asks_a_judge(made):
    with pytest.raises(UserError, match=r"judges: examples/run_grpo\.py asks no server of NeMo-Gym; leave judges out"):
        made(entry="examples/run_grpo.py")


def test_what_changes_rewards_is_part_of_the_identity_and_nothing_else(made, tmp_path):
    def content(*changes, **stage):
        return Stage(made(*changes, **stage), tmp_path, "rl").config.content

    told = content()
    assert {content(changes) for changes in MADE["same"]} == {told}
    assert len({told, content(judges={}), *(content(changes) for changes in MADE["other"])}) == 2 + len(MADE["other"])
    moved = MADE["judges"]["safety"] | {"address": "https://other/v1"}
    assert content(judges=MADE["judges"] | {"safety": moved}) == told
    assert "judges" not in Stage(made(judges={}), tmp_path, "rl").config.values(), "as identities before judges had it"


def test_nodes_of_pools_are_counted_beside_those_of_the_ray_cluster(made, tmp_path):
    stage = Stage(made(), tmp_path, "rl")
    assert (stage.settings.resources.nodes, stage.settings.nodes_beside) == (2, 4 * 2 + 3)
    planned = estimate(site(), stage, 10)
    assert (planned.nodes, planned.gpus) == (13, 13 * 4)


def test_the_driver_is_told_an_address_or_a_placeholder_and_the_name_of_the_model(made):
    told = hydra_overrides(any_launch("rl", made(), Path("/none")))
    genrm, nl2bash, safety = (f"env.nemo_gym.{judge['server']}" for judge in MADE["judges"].values())
    for override in (
        f"++{genrm}.base_url=__JUDGE_GENRM_BASE_URL__",
        f"{genrm}.model=model",
        f"++{nl2bash}.base_url=__JUDGE_NL2BASH_BASE_URL__",
        f"++{safety}.base_url='http://host:8000/v1'",
        f"{safety}.model=safety",
    ):
        assert told.count(override) == 1, override


def test_pools_have_whole_nodes_ports_of_their_own_and_arguments_to_the_letter(made):
    told = pool_environment(runtime_of(made(), "rl", site()), LOGS)
    assert told["EXTERNAL_VLLM_POOLS"] == "JUDGE_GENRM JUDGE_NL2BASH"
    assert told["EXTERNAL_VLLM_SHARED_ROOT"] == "/lustre"
    assert told["RAY_SUB"] == "/lustre/code/main/ray.sub"
    assert (told["JUDGE_GENRM_TENSOR_PARALLEL_SIZE"], told["JUDGE_NL2BASH_TENSOR_PARALLEL_SIZE"]) == ("8", "4")
    assert {told[f"JUDGE_{name}_LB_PORT"] for name in ("GENRM", "NL2BASH")} == {str(FIRST_PORT), str(FIRST_PORT + 1)}
    assert told["JUDGE_GENRM_VLLM_ARGS"].split("\n") == MADE["judges"]["genrm"]["arguments"]
    assert told["JUDGE_GENRM_ENV_VARS"] == "FLASHINFER_WORKSPACE_BASE=/tmp"
    assert told["JUDGE_NL2BASH_VLLM_PYTHON"].startswith("/opt/ray_venvs/nemo_rl.models.generation.vllm.")
    assert pool_environment(runtime_of(made(judges={}), "rl", site()), LOGS) == {}


def test_files_of_pools_lie_under_one_mount(made):
    with pytest.raises(UserError) as refused:
        pool_environment(runtime_of(made(), "rl", site("/home/me/main", ("/lustre:/lustre", "/home:/home"))), LOGS)
    for words in (
        "site x: mounts: ",
        "nemo_rl.checkouts.main (/home/me/main)",
        "judges.genrm.model (/lustre/models/genrm)",
    ):
        assert words in str(refused.value)
    second = site(mounts=("/:/", "/home:/home", "/data:/lustre", "/lustre/:/lustre/:rw"), HF_HOME="/lustre/hf")
    assert pool_environment(runtime_of(made(), "rl", second), LOGS)["EXTERNAL_VLLM_SHARED_ROOT"] == "/lustre"
    with pytest.raises(UserError, match=r"environment\.HF_HOME \(/data/hf\)"):
        pool_environment(runtime_of(made(), "rl", site(HF_HOME="/data/hf")), LOGS)


def test_the_doctor_names_a_checkout_without_tools_and_files_that_no_pool_would_see(made, tmp_path):
    where = site(str(tmp_path))
    stage = Stage(made(), Path("/elsewhere"), "rl")
    context = StageContext(**vars(runtime_of(stage.recipe, "rl", where)), stage=stage)
    assert [(finding.trap, finding.stops) for finding in check_judges(context)] == [(18, True), (14, True)]
    without = Stage(made(judges={}), Path("/elsewhere"), "rl")
    context = StageContext(**vars(runtime_of(without.recipe, "rl", where)), stage=without)
    assert list(check_judges(context)) == []


class Models(BaseHTTPRequestHandler):
    """A server of model `safety`; all other addresses than /v1/models are unknown."""

    def do_GET(self):
        body = json.dumps({"data": [{"id": "safety"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Stay silent."""


@pytest.fixture
def server():
    """The address of a running server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def asking(made, **judge: str) -> Runtime:
    judges = {"safety": MADE["judges"]["safety"] | judge}
    return runtime_of(made(judges=judges), "rl", site())


def test_a_judge_elsewhere_is_asked_for_its_models_before_the_training(made, server):
    ask_addresses(asking(made, address=f"{server}/v1"))
    with pytest.raises(
        UserError, match=r"rl: judges\.safety\.address: http://\S+/v1 serves safety, not other; mend model"
    ):
        ask_addresses(asking(made, address=f"{server}/v1", model="other"))
    for address in (server, "http://127.0.0.1:9/v1"):
        with pytest.raises(UserError, match=r"judges\.safety\.address: http://\S+/models does not answer as vLLM does"):
            ask_addresses(asking(made, address=address))


def test_slurms_variables_of_both_components_are_restored():
    told = slurm_variables(JOB, Slurm(), Path("/code"))
    assert (told["SLURM_HET_SIZE"], told["SLURM_JOB_NODELIST"]) == ("2", "n1,n2")
    assert [told[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in (0, 1)] == ["n1,n2", "n3,n4"]
    assert "SLURM_HET_SIZE" not in slurm_variables(replace(JOB, beside=()), Slurm(), Path("/code"))


def page_judges() -> list[dict]:
    """The judges of the page's examples."""
    section = (ROOT / "docs/nemo_rl.md").read_text().partition("## Judges outside")[2].partition("\n## ")[0]
    return [yaml.safe_load(text)["judges"] for text in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


@pytest.mark.parametrize("judges", page_judges())
def test_the_pages_examples_are_taken(made, judges):
    assert made(judges=judges).stages["rl"].judges.keys() == {"genrm", "nl2bash"}


@needs_checkouts
def test_the_pages_switch_is_the_launchers(made):
    launcher = (
        Path(CHECKOUTS, "main/examples/nemo_gym/nemotron-3-ultra/ultra_launch.sh").read_text().replace('\\"', '"')
    )
    for name, judge in page_judges()[1].items():
        assert f"{name.upper()}_REPLICAS:-{judge['replicas']}}}" in launcher
        assert f"++env.nemo_gym.{judge['server']}.base_url" in launcher
        assert all(f'"{key}={value}"' in launcher for key, value in judge["environment"].items())
        own = launcher.partition(f"{name}_vllm_args=(")[2].partition("external_vllm_pool_args")[0]
        told = dict(argument.partition("=")[::2] for argument in judge["arguments"])
        assert {*re.findall(r"--[\w-]+", own)} - {"--reasoning-parser-plugin"} == told.keys()
        said = dict(re.findall(r"^    (--[\w-]+) (\S+)$", own, re.MULTILINE))
        for option, value in said.items():
            variable = re.fullmatch(r'"\$\{(\w+)\}"', value)
            assert value == told[option] or f"{variable[1]}:-{told[option]}}}" in launcher, option


@needs_checkouts
def test_upstreams_script_gets_all_variables_that_it_demands_and_reads_no_other_name_of_ours(made):
    text = Path(CHECKOUTS, "main", START_POOLS).read_text()
    launch = any_launch("rl", made(), Path("/lustre/code/main"))
    launch = replace(launch, runtime=replace(launch.runtime, site=site()))
    told = slurm_variables(JOB, Slurm(), Path("/code")) | cluster_environment(launch, LOGS, 64)
    demanded = set(re.findall(r'^: "\$\{(\w+):\?', text.partition("VLLM_SERVER_BODY")[0], re.MULTILINE))
    of_pool = set(re.findall(r'require_pool_value "\$\{pool\}" (\w+)', text))
    assert len(demanded) > 10 and len(of_pool) > 5
    assert [name for name in demanded if not told.get(name)] == []
    assert [name for name in of_pool if not told.get(f"JUDGE_GENRM_{name}")] == []
    known = of_pool | set(re.findall(r'pool_value (?:"\$\{pool\}" )?([A-Z_]+)', text))
    assert {name.removeprefix("JUDGE_GENRM_") for name in told if name.startswith("JUDGE_GENRM_")} <= known
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", pool) for pool in told["EXTERNAL_VLLM_POOLS"].split())
    assert all(told[f"{pool}_URL_PLACEHOLDER"] in told["COMMAND"] for pool in told["EXTERNAL_VLLM_POOLS"].split())
