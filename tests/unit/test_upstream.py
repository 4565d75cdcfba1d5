"""A recipe's keys are held against the release that it names: a made-up checkout here, real ones where they are."""

import ast
import re
from pathlib import Path
from typing import Optional

import pytest
import yaml

from scripts.backends.nemo_rl.checks.context import load_upstream, value_of
from scripts.backends.nemo_rl.checks.places import unknown_keys
from scripts.backends.nemo_rl.metrics import NAMES
from scripts.backends.nemo_rl.releases import load_releases, release_of
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from tests.cases import cases, tables_of
from tests.conftest import ROOT
from tests.production import CHECKOUTS, PRODUCTION, needs_checkouts, stages_of, stated, whole_recipe

CONFIG = "examples/nemo_gym/stage.yaml"
AT = "config/recipes/made.yaml: stages.rlvr"
MADE = tables_of("upstream")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A release in which one config inherits from two others, as NeMo-RL's do."""
    for name, config in MADE["files"].items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config) if config else "")
    return tmp_path / "checkout"


@pytest.fixture
def recipe(tmp_path):
    """A recipe of one stage that the made-up release can train; `changes` to that stage."""

    def load(**changes: object) -> Recipe:
        stage = dict(MADE["stage"])
        for key, value in changes.items():
            stage[key] = stage[key] | value if isinstance(stage.get(key), dict) else value
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump(MADE["recipe"] | {"stages": {"rlvr": stage}}))
        return load_recipe(path)

    return load


def test_a_config_is_read_with_all_that_it_inherits(checkout):
    config = load_upstream(checkout / CONFIG)
    batch = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
    assert config["grpo"] == batch | {"max_num_steps": 9, "seed": 7}
    assert config["policy"]["optimizer"] == {"name": "torch.optim.AdamW"}, "sections are merged"
    assert config["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-6, "a number, as OmegaConf reads it"
    assert config["data"] == {"train": {"data_path": "t"}, "validation": {"data_path": "v"}}, "_override_ replaces"
    assert "defaults" not in config


def test_a_recipe_that_says_only_what_the_release_knows_has_no_findings(checkout, recipe):
    fitting = recipe(policy={"megatron_cfg": {"tensor_model_parallel_size": 2}}, add={"env": {"nemo_gym": {"new": 1}}})
    assert unknown_keys(fitting, checkout, "rlvr") == []


@cases("upstream.unknown", "changes", "expected")
def test_what_the_release_has_not_is_named_with_the_nearest(checkout, recipe, changes, expected):
    (line,) = unknown_keys(recipe(**changes), checkout, "rlvr")
    assert line.startswith(f"{AT}.{expected}")


def test_what_the_launch_adds_is_checked_too(checkout, recipe):
    path = checkout / "examples/configs/base.yaml"
    path.write_text(path.read_text().replace("checkpoint_must_save_by:", "must_save_by:"))
    (line,) = unknown_keys(recipe(), checkout, "rlvr")
    assert line.startswith(f"{AT}.checkpointing.checkpoint_must_save_by: no key of {CONFIG}")


def test_a_config_that_inherits_from_nothing_is_named(checkout, recipe):
    (checkout / "examples/configs/grpo.yaml").unlink()
    expected = f"{AT}.config: {CONFIG} needs grpo.yaml, which is not in the checkout of v0.7.0"
    assert unknown_keys(recipe(), checkout, "rlvr") == [expected]


def test_a_config_that_is_no_yaml_says_where(checkout, recipe):
    (checkout / CONFIG).write_text("a: [")
    with pytest.raises(UserError, match=r"stage.yaml: not valid YAML"):
        unknown_keys(recipe(), checkout, "rlvr")


def differing(recipe: Recipe, checkout: Path) -> set[str]:
    """The keys that stages besides SFT say otherwise than their configs."""
    keys = set()
    for stage in (stage for name, stage in recipe.stages.items() if name != "sft"):
        config, ours = load_upstream(checkout / stage.config), stated(stage, release_of(recipe.release))
        keys |= {key for key, value in ours.items() if value_of(config, key) != value}
    return keys


@needs_checkouts
@cases("upstream.differ", "recipe", "keys", "besides")
def test_a_recipe_differs_from_the_published_configs_where_there_is_a_reason(recipe, keys, besides):
    whole = whole_recipe(recipe)
    assert differing(whole, Path(CHECKOUTS) / whole.release) == {*keys, *besides}


@needs_checkouts
@pytest.mark.parametrize("name", PRODUCTION)
def test_every_shipped_recipe_fits_its_release(name):
    recipe = whole_recipe(name)
    checkout = Path(CHECKOUTS) / recipe.release
    assert not any(unknown_keys(recipe, checkout, stage) for stage in stages_of(recipe))
    if name.startswith("super3"):
        # the configs are the model's own, so only what they leave open or keep for ever may be said otherwise
        judge = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.model"
        keys = differing(recipe, checkout)
        own = {"super3-b200": {judge}, "super3-1.7b": {"grpo.max_num_steps"}}
        assert keys == {"checkpointing.keep_top_k", "checkpointing.metric_name", "grpo.val_period"} | own.get(
            name, set()
        )


@needs_checkouts
@pytest.mark.parametrize("release", load_releases())
def test_what_is_read_of_a_drivers_events_bears_the_releases_names(release):
    """The names stand in the sources as literals or fields, but for those that the table says are not there."""
    text = "\n".join(path.read_text() for path in (Path(CHECKOUTS) / release / "nemo_rl").rglob("*.py"))
    names = {part for tag in (*NAMES["columns"], *NAMES["counts"]) for part in tag.split("/")[1:]}
    names |= {phase for phases in NAMES["phases"].values() for phase in phases}
    absent = {name for name in names if not re.search(rf"""["'/]{re.escape(name)}["'/]|\b{re.escape(name)}:""", text)}
    assert absent == set(MADE["not_logged"].get(release, []))
    assert "sleep(level=1)" in text and "sleep(level=2)" not in text, "trap 82"
    assert "prefix_cache_hits" not in text, "trap 84: a column would show more than the docs say"


def releases_with_traps() -> list[tuple[str, str, str]]:
    """Release, trap and what the table of docs/traps.md says, for each trap whose code is known here."""
    lines = (ROOT / "docs/traps.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    (head,) = (cells for cells in table if cells[0] == "trap" and cells[-1] == "where")
    rows = (
        cells for cells in table if len(cells) == len(head) and cells[0].isdecimal() and int(cells[0]) in MADE["traps"]
    )
    return [(head[place], cells[0], cells[place]) for cells in rows for place in range(1, len(head) - 1)]


@needs_checkouts
@pytest.mark.parametrize(("release", "trap", "told"), releases_with_traps())
def test_a_release_has_the_trap_where_its_sources_say_so(release, trap, told):
    code = MADE["traps"][int(trap)]
    files = [file for pattern in code["files"].split() for file in Path(CHECKOUTS, release).glob(pattern)]
    if told == "not read" or (not files and "3rdparty" in code["files"]):
        pytest.skip("the release's submodule is not at hand")
    text = "".join(file.read_text() for file in files)
    has = bool(re.search(code["has"], text)) and not ("lacks" in code and re.search(code["lacks"], text))
    assert has is (told == "yes")


def test_every_trap_whose_code_is_known_is_in_the_table_of_releases():
    assert {int(trap) for _, trap, _ in releases_with_traps()} == MADE["traps"].keys()


def function_of(release: str, file: str, name: str):
    """A function of a release's source, made without the module's imports."""
    text = Path(CHECKOUTS, release, file).read_text()
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    names = {"Optional": Optional, "DataConfig": dict}
    exec(ast.get_source_segment(text, found), names)  # noqa: S102 (the release's own)
    return names[name]


@needs_checkouts
@pytest.mark.parametrize("release", ["v0.7.0", "main"])
def test_the_guard_of_the_loaders_position_takes_two_blends_of_gym_for_one(release):
    name_of = function_of(release, "nemo_rl/data/utils.py", "get_train_dataset_name")
    first, second = ({"train": {"dataset_name": "NemoGymDataset", "data_path": path}} for path in ("rlvr1", "rlvr2"))
    assert name_of(first) == name_of(second) != name_of({"train": [{"dataset_name": "another"}]})


@needs_checkouts
@pytest.mark.parametrize("release", ["v0.7.0", "main"])
def test_a_misspelt_agent_is_taught_by_the_default_teacher_unless_names_must_match(release, capsys):
    resolve = function_of(release, "nemo_rl/algorithms/opd.py", "resolve_reference_aliases")
    told = ([{"name": "mcqa"}, {"name": "math"}], {"math": "/m", "general": "/g", "mqca": "/q"}, "general")
    assert resolve(*told) == ["general", "math"] and "falling back to 'general'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="No teacher model mapping for agent 'mcqa'"):
        resolve(*told, strict_agent_name_match=True)
