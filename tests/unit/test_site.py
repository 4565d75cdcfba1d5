"""A site's file: what it may say, what jobs ask for by it, and what of it a cluster refuses."""

import inspect
import re
import shlex

import pytest
import yaml
from pydantic import ValidationError
from snakemake_executor_plugin_slurm import submit_string, utils
from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options

from scripts.errors import UserError
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Resources
from scripts.slurm import resources as slurm_resources
from scripts.slurm.resources import (
    check_site,
    light_resources,
    minutes,
    node_groups,
    one_node_resources,
    training_resources,
)
from tests.cases import cases
from tests.conftest import ROOT

RECIPE = load_recipe(ROOT / "config/recipes/tiny.yaml")
SINFO = "batch*|up|1-00:00:00|12|gpu:h100:8(S:0-1)|h100,ib\nbatch*|up|1-00:00:00|4|gpu:a100:8|a100\nshort|up|30:00|2|(null)|(null)\nold|down|infinite|3|gpu:4|(null)\n"


def site(**slurm: object) -> Site:
    return Site.model_validate({"name": "test", "threads": 2, "slurm": slurm})


@pytest.fixture
def sinfo(monkeypatch):
    """A cluster whose sinfo says SINFO; the real one is asked in tests/slurm."""
    monkeypatch.setattr(slurm_resources, "ask", lambda *command: SINFO)


def refusal(resources: Resources | None = None, **slurm: object) -> str:
    with pytest.raises(UserError) as error:
        check_site("my.yaml", site(**slurm), {"rlvr1": resources or Resources()})
    return str(error.value)


@cases("site.harmful", "wrong", "place")
def test_what_could_harm_a_command_line_is_refused_with_its_place(tmp_path, wrong, place):
    path = tmp_path / "site.yaml"
    path.write_text(f"name: x\nthreads: 1\n{wrong}\n")
    with pytest.raises(UserError, match=rf"site.yaml:3: {place}"):
        load_site(path, RECIPE)


def test_the_shipped_sites_are_valid_and_so_is_the_clusters_with_every_key_uncommented(tmp_path):
    for path in (ROOT / "config/sites").glob("*.yaml"):
        assert load_site(path, RECIPE).name == path.stem
    text = (ROOT / "config/sites/cluster.yaml").read_text()
    (tmp_path / "all.yaml").write_text(re.sub(r"(?m)^( *)# ( *)(?=\w+: )", r"\1\2", text))
    full = load_site(tmp_path / "all.yaml", RECIPE)
    assert (
        full.slurm.account and full.slurm.network and full.slurm.budget_gpu_hours and full.mounts and full.environment
    )
    assert full.stages["rlvr1"].nodes == 2


@cases("site.arguments", "arguments", "said")
def test_arguments_that_others_set_or_that_are_no_words_of_sbatch_are_refused_with_the_reason(
    tmp_path, arguments, said
):
    for place in ({"slurm": {"arguments": arguments}}, {"stages": {"sft": {"arguments": arguments}}}):
        (tmp_path / "site.yaml").write_text(yaml.safe_dump({"name": "x", "threads": 1} | place))
        with pytest.raises(UserError, match=r"site.yaml:\d+: (slurm|stages.sft)\.arguments") as error:
            load_site(tmp_path / "site.yaml", RECIPE)
        assert said in str(error.value)


def test_every_option_that_the_plugin_sets_is_refused_but_for_the_comment():
    known = " ".join([*get_forbidden_slurm_options(), inspect.getsource(submit_string), inspect.getsource(utils)])
    named = {*re.findall(r"--([a-z-]+\w)", known)} - {"comment", "exclude"}
    assert {"job-name", "ntasks-per-gpu", "gpus", "qos", "requeue", "reservation"} <= named
    for option in named:
        with pytest.raises(ValidationError, match=f"sbatch's --{option} "):
            site(arguments={option: "x"})


def test_a_stage_has_its_own_way_into_the_queue_over_the_sites_and_light_jobs_have_theirs():
    here = Site.model_validate(
        {
            "name": "x",
            "threads": 1,
            "slurm": {
                "account": "a",
                "qos": "q",
                "arguments": {"comment": "it's $HOME", "exclude": "n1", "contiguous": True},
                "light": {"account": "cpu", "arguments": {"nice": 5}},
            },
            "stages": {"rlvr1": {"partition": "big", "qos": "long", "arguments": {"exclude": False, "segment": 16}}},
        }
    )
    own, other = (training_resources(here.for_stage(name), Resources()) for name in ("rlvr1", "sft"))
    assert [own[f"slurm_{key}"] for key in ("account", "partition")] + [own["qos"]] == ["a", "big", "long"]
    assert shlex.split(own["sbatch_arguments"]) == ["--comment=it's $HOME", "--contiguous", "--segment=16"]
    assert (other["slurm_partition"], other["qos"]) == (None, "q") and "--exclude=n1" in other["sbatch_arguments"]
    light = light_resources(here)
    assert (light["slurm_account"], light["qos"], light["sbatch_arguments"]) == ("cpu", "q", "--nice=5")


@pytest.mark.parametrize(
    ("gres", "asked", "step"),
    [
        (None, ("gpu:4", 0, None), "gpu:4"),
        ("gpu:h100-sxm:4", (None, 2, "--gres=gpu:h100-sxm:4"), "gpu:h100-sxm:4"),
        ("gpu:4,nic:2", (None, 2, "--gres=gpu:4,nic:2"), "gpu:4,nic:2"),
        ("none", (None, 2, None), ""),
    ],
)
def test_gres_is_asked_for_typed_several_or_not_at_all(gres, asked, step):
    where = site(gpus_per_node=4, gres=gres)
    resources = training_resources(where, Resources(nodes=2))
    assert tuple(resources[key] for key in ("gres", "tasks", "sbatch_arguments")) == asked
    assert where.slurm.node_gres == step
    with pytest.raises(ValidationError, match="gres asks for 4 GPUs of a node, but gpus_per_node is 8"):
        site(gres="gpu:h100:4")


def test_memory_has_a_unit_wherever_it_is_said_and_0_is_all_of_a_whole_node():
    says = {"name": "x", "threads": 1, "slurm": {"light": {"mem_mb": "32G"}}, "stages": {"sft": {"mem_mb": "1T"}}}
    here = Site.model_validate(says)
    assert Resources(mem_mb="64G").mem_mb == 65536 and light_resources(here)["mem_mb"] == 32768
    assert here.resources_of("sft", RECIPE.stages["sft"]).mem_mb == 1 << 20
    whole, part = (training_resources(site(exclusive=each), Resources(mem_mb=0)) for each in (True, False))
    assert (whole["sbatch_arguments"], part["sbatch_arguments"]) == ("--mem=0", None)
    with pytest.raises(ValidationError, match="number of MB"):
        Resources(mem_mb="64 GB")


def test_a_team_of_weights_and_biases_without_a_project_is_refused(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("name: x\nthreads: 1\nnemo_rl: {cache: /cache, wandb_entity: team}\n")
    with pytest.raises(UserError, match="nemo_rl: wandb_entity is for a wandb_project; name one, or leave it out"):
        load_site(path, RECIPE)


def test_the_sites_word_on_a_stage_wins_over_the_recipes_but_for_the_longest_time_limit():
    here = Site.model_validate(
        {"name": "x", "threads": 1, "slurm": {"max_runtime": 240}, "stages": {"rlvr1": {"nodes": 4, "runtime": 600}}}
    )
    resources = here.resources_of("rlvr1", RECIPE.stages["rlvr1"])
    assert (resources.nodes, resources.runtime, resources.mem_mb) == (4, 240, 4000)
    assert here.resources_of("sft", RECIPE.stages["sft"]).runtime == 60


def test_a_training_asks_for_whole_nodes_and_what_only_publishes_for_part_of_one():
    where = site(partition="batch", account="a", constraint="h100", reservation="r", light={"partition": "cpu"})
    full = training_resources(where, Resources(nodes=32, runtime=240))
    assert (full["nodes"], full["gres"], full["slurm_extra"]) == (32, "gpu:8", "--exclusive --reservation=r")
    assert (full["slurm_partition"], full["slurm_account"], full["constraint"]) == ("batch", "a", "h100")
    light = training_resources(where, Resources(nodes=32, runtime=240), publishes_only=True)
    assert (light["nodes"], light["gres"], light["slurm_extra"], light["constraint"]) == (1, None, None, None)
    assert light["slurm_partition"] == light_resources(where)["slurm_partition"] == "cpu"
    waiting = training_resources(where, Resources(nodes=32, runtime=240), publishes_only=True, waits=True)
    assert (waiting["nodes"], waiting["runtime"]) == (1, 240)


def test_a_second_component_asks_for_all_that_the_first_does_and_for_no_spares(sinfo):
    says = {"account": "a", "constraint": "h100", "qos": "q", "reservation": "r", "spares": 2}
    where = site(partition="batch", arguments={"segment": 16, "comment": "it's"}, **says)
    asked = training_resources(where, Resources(nodes=32, runtime=240, mem_mb=0), away=["n9"], beside=12)
    assert asked["nodes"] == 32
    told = [
        *("--account=a", "--partition=batch", "--constraint=h100", "--qos=q", "--reservation=r", "--time=240"),
        *("--nodes=12", "--ntasks=12", "--gres=gpu:8", "--exclusive", "--requeue", "--segment=4", "--comment=it's"),
        *("--mem=0", "--exclude=n9"),
    ]
    assert sorted(shlex.split(asked["second_component"])) == sorted(told)
    for resources in (
        training_resources(where, Resources(nodes=32), publishes_only=True, beside=12),
        training_resources(where, Resources(nodes=32)),
        one_node_resources(where),
    ):
        assert resources["second_component"] is None
    with pytest.raises(UserError, match="stage rlvr1 asks for 14 nodes, but can get 12 at most"):
        check_site("my.yaml", site(constraint="h100"), {"rlvr1": Resources(nodes=12)}, {"rlvr1": 2})


def test_every_submitted_job_says_its_memory():
    where, big = site(), Resources(nodes=2, mem_mb=9000)
    jobs = [training_resources(where, big), light_resources(where), one_node_resources(where)]
    assert [job["mem_mb"] for job in jobs] == [9000, 4000, 0], "0: all that the node has"
    assert training_resources(where, big, publishes_only=True)["mem_mb"] == 4000
    text = "\n".join(path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")])
    local = {
        name for names in re.findall(r"(?m)^localrules:\n((?:    \w+,\n)+)", text) for name in re.findall(r"\w+", names)
    }
    rules = dict(re.findall(r"(?ms)^ *rule (\w+):\n(.*?)(?=^ *rule |\Z)", text))
    submitted = {name for name in rules.keys() - local if "localrule: True" not in rules[name]}
    assert {"train", "evaluate", "fill"} <= submitted
    assert [name for name in submitted if "resources:\n" not in rules[name]] == []


def test_without_gpus_a_training_asks_for_a_task_on_each_node():
    # the plugin asks for one task without it, and Slurm then gives one node however many were wanted
    assert training_resources(site(gpus_per_node=0), Resources(nodes=3))["tasks"] == 3


@pytest.mark.parametrize(
    ("accelerator", "processes", "gpus", "cpus"),
    [("cpu", None, 0, 4), ("cpu", 2, 0, 8), ("cpu", None, 8, 4), ("auto", None, 8, 32), ("cuda", 2, 8, 8)],
)
def test_a_training_that_shares_its_nodes_asks_for_the_cpus_of_all_its_processes(accelerator, processes, gpus, cpus):
    slurm = {"gpus_per_node": gpus, "exclusive": False}
    says = {"name": "x", "threads": 4, "accelerator": accelerator, "processes": processes, "slurm": slurm}
    asked = training_resources(Site.model_validate(says), Resources(nodes=2))
    assert (asked["cpus_per_task"], asked["gres"]) == (cpus, f"gpu:{gpus}" if gpus else None)


def test_sinfo_is_read():
    first = node_groups(SINFO)[0]
    assert (first.partition, first.is_default, first.nodes, first.gpus, first.limit) == ("batch", True, 12, 8, 1440)
    assert [minutes(text) for text in ("infinite", "30:00", "4:00:00", "2-12:00:00")] == [None, 30, 240, 3600]


def test_a_cluster_that_has_everything_is_accepted(sinfo):
    check_site("my.yaml", site(constraint="h100"), {"rlvr1": Resources(nodes=12, runtime=1440)})


@cases("site.cluster", "slurm", "resources", "said")
def test_what_the_cluster_has_not_is_named_before_anything_is_submitted(sinfo, slurm, resources, said):
    assert said in refusal(Resources(**resources), **slurm)


def test_the_default_profile_fights_the_slurm_profile_nowhere():
    read = lambda name: yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())  # noqa: E731
    default, slurm = read("default"), read("slurm")
    assert {key for key in default.keys() & slurm.keys() if default[key] != slurm[key]} == set()
    assert default.keys() - slurm.keys() == {"cores", "resources"}, "these alone are of this machine"
