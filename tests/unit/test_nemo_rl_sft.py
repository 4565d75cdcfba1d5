"""SFT by NeMo-RL: what its driver is told, the rows that it gets, and what is refused before a node is asked for.

tests/nemo_rl/test_sft_rows.py holds tokens and masks against the releases' own code.
"""

import json
from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl.backend import BACKEND
from scripts.backends.nemo_rl.checks import sums as checks
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.places import any_launch
from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.demonstrations import write_rows
from scripts.backends.nemo_rl.releases import load_releases
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.nemo_rl.train import launch_of
from scripts.backends.protocol import StopRequest, TrainingJob
from scripts.errors import UserError
from scripts.model.processor import make_tokenizer
from scripts.model.scratch import CHAT_TEMPLATE
from scripts.recipe.load import load_recipe, load_site
from scripts.stage.stage import Stage
from tests.cases import cases
from tests.conftest import ROOT
from tests.stages import refused_by_backend

ASKED, ANSWER = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
FORGETFUL = CHAT_TEMPLATE.replace("{% for message in messages %}", "{% for message in messages[-2:] %}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer, which knows a token for the begin."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def stage_of(tmp_path, model):
    """A stage of SFT with such settings and rows."""

    def make(*conversations, release="v0.7.0", rows=(), **settings):
        own = {
            **{"backend": "nemo_rl", "algorithm": "sft", "blend": "demos", "config": "examples/configs/sft.yaml"},
            **{"entry": "examples/run_sft.py", "cluster": {"num_nodes": 2}},
            "policy": {"train_global_batch_size": 16, "max_total_sequence_length": 40} | settings.pop("policy", {}),
        }
        recipe = {
            **{"name": "some", "release": release, "model": {"name": str(model)}, "stages": {"sft": own | settings}},
            "source": {"kind": "folder", "path": str(tmp_path)},
            "blends": {"demos": {"kind": "demonstrations", "file": "rows.jsonl", "holdout": 1}},
        }
        (tmp_path / "some.yaml").write_text(yaml.safe_dump(recipe))
        stage = Stage(load_recipe(tmp_path / "some.yaml"), tmp_path / "results", "sft")
        stage.train_split.parent.mkdir(parents=True, exist_ok=True)
        written = [*({"messages": list(each)} for each in conversations), *rows]
        for split in (stage.train_split, stage.validation_split):
            split.write_text("".join(json.dumps(row) + "\n" for row in written))
        return stage

    return make


def told(stage):
    """What the driver is told, by key, the last word of each."""
    overrides = hydra_overrides(any_launch("sft", stage.recipe, Path("/checkout")))
    return {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in overrides)}


def test_each_release_reads_the_splits_by_its_own_keys(stage_of):
    for name, release in load_releases().items():
        found = told(stage_of(release=name))
        reader = {key: value for key, value in found.items() if value == "openai_format"}
        assert reader and found["policy.tokenizer.chat_template"] == "default"
        assert sum("/anywhere/data/" in value for value in found.values()) == 2
        preserves = any("use_preserving_dataset" in reader for reader in release.sft_data.values())
        assert preserves == any(key.endswith("use_preserving_dataset") for key in found)


def test_what_the_recipe_says_wins_over_what_sft_is_told_of_itself(stage_of):
    told_plainly = told(stage_of())
    assert (told_plainly["data.add_eos"], told_plainly["policy.tokenizer.name"]) == ("true", "/model")
    own = {"add_eos": False, "train": {"data_path": "{train}", "dataset_name": "own.Reader"}}
    found = told(stage_of(data=own, policy={"tokenizer": {"chat_template": "own.jinja"}}))
    assert (found["data.add_eos"], found["policy.tokenizer.chat_template"]) == ("false", "own.jinja")
    assert found["data.train.dataset_name"] == "own.Reader" and "data.validation.data_path" not in found


def test_the_driver_gets_the_rows_as_templates_read_them(stage_of, tmp_path):
    row = {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "1"}]}, CALLED], "tools": []}
    stage = stage_of(rows=[row | {"agent_ref": {"name": "any"}}])
    job = TrainingJob.of(stage, max_num_steps=1, threads=1, stop=StopRequest())
    site = load_site(ROOT / "config/sites/h100.yaml", stage.recipe)
    launch = launch_of(job, site)
    assert launch.data.is_relative_to(job.run.absolute())
    write_rows(stage.train_split, launch.data / "train-split.jsonl")
    called = CALLED | {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    assert json.loads((launch.data / "train-split.jsonl").read_text()) == {
        "messages": [ASKED | {"content": "1"}, called]
    }


def shown(stage):
    """The texts that are learnt of a stage's only row, and the whole."""
    (row,) = BACKEND.shown_rows(stage, 1)
    whole = "".join(text for part in row["parts"] for text in part["texts"])
    learnt = ["".join(part["texts"]) for part in row["parts"] if part["is_learnt"]]
    return learnt, whole


def test_all_that_the_assistant_adds_is_learnt_with_its_header(stage_of):
    learnt, whole = shown(stage_of([ASKED, ANSWER, ASKED, ANSWER], policy={"max_total_sequence_length": 80}))
    assert learnt == ["<|assistant|>4<|end|>"] * 2
    assert whole == "<|user|>2+2<|end|><|assistant|>4<|end|>" * 2


def test_generation_prompts_and_the_last_message_alone_change_what_is_learnt(stage_of):
    talk, policy = [ASKED, ANSWER, ASKED, ANSWER], {"max_total_sequence_length": 80}
    assert shown(stage_of(talk, policy=policy, data={"add_generation_prompt": True}))[0] == ["4<|end|>"] * 2
    assert len(shown(stage_of(talk, policy=policy, sft={"only_unmask_final": True}))[0]) == 1


def test_a_row_that_fills_the_length_is_masked_whole(stage_of):
    text = "<|user|>2+2<|end|><|assistant|>4<|end|>"
    tokens = len(make_tokenizer()(text, add_special_tokens=False)["input_ids"])
    assert shown(stage_of([ASKED, ANSWER], policy={"max_total_sequence_length": tokens}))[0] == []
    assert shown(stage_of([ASKED, ANSWER], policy={"max_total_sequence_length": tokens + 1}))[0] != []


def problems(stage):
    """What the preflight says of the rows; the site's own problems are others."""
    site = load_site(ROOT / "config/sites/h100.yaml", stage.recipe)
    return [line for line in refused_by_backend(stage, site) if "split.jsonl:" in line]


@pytest.mark.parametrize(
    ("row", "template", "release", "says"),
    [
        ([ASKED, ANSWER, ASKED, ANSWER], FORGETFUL, "v0.7.0", "messages[2]: the chat"),
        ([ASKED, ANSWER], "{{ raise_exception('no') }}", "v0.7.0", "template fails"),
        ([ASKED, ANSWER], "{% if false %}{% endif %}", "v0.7.0", "passes over a mess"),
        ([ASKED | {"content": [PICTURE]}, ANSWER], None, "v0.7.0", "run_vlm_sft.py"),
        ([ASKED, CALLED], None, "v0.6.0", "fill with nulls"),
    ],
)
def test_a_row_that_would_be_read_otherwise_is_refused_by_its_place(stage_of, row, template, release, says):
    settings = {"policy": {"tokenizer": {"chat_template": template}}} if template else {}
    good = [] if template else [[ASKED, ANSWER]]
    stage = stage_of(*good, row, release=release, **settings)
    lines = problems(stage)
    assert len(lines) == 2, "of either split"
    assert lines[0].startswith(f"{stage.train_split}:{1 + len(good)}: ") and says in lines[0]
    assert problems(stage_of([ASKED, ANSWER])) == []


def test_sft_wants_its_own_driver(stage_of):
    with pytest.raises(UserError, match=r"stages.sft: entry must end in run_sft.py or run_vlm_sft.py"):
        stage_of(entry="examples/run_grpo.py")


@cases("nemo_rl_sft.batches", "settings", "says")
def test_batches_and_validation_must_fit(stage_of, settings, says):
    stage = stage_of(**settings)
    site = load_site(ROOT / "config/sites/h100.yaml", stage.recipe)
    context = StageContext(**vars(runtime_of(stage.recipe, "sft", site)), stage=stage)
    each = (checks.check_parallelism, checks.check_checkpoints)
    found = [finding.message for check in each for finding in check(context)]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
