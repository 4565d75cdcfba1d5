"""Each environment has a teacher, and the teachers read the policy's tokens as the policy does."""

import shutil

import pytest

from scripts.backends.trl.checks import unfit_readers
from scripts.backends.trl.on_policy import DistillationLoss
from scripts.files import read_json, write_json
from scripts.model.processor import make_tokenizer
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.stage_settings import Teaching
from scripts.rows.chat_format import ChatFormat
from scripts.stage.stage import Stage
from tests.cases import cases
from tests.conftest import ROOT

RECIPE = ROOT / "tests/distillation.yaml"
MATH, MCQA = "math_with_judge_simple_agent", "mcqa_simple_agent"


@pytest.mark.parametrize(
    ("of", "default", "roles", "taught"),
    [
        ({MATH: "a", MCQA: "b"}, None, "ab", "ab"),
        ({MATH: "a"}, "b", "ab", "ab"),
        ({}, "b", "ab", "bb"),
        ({}, None, "a", "aa"),
        ({MATH: "a"}, None, "a", "a-"),
        ({}, None, "ab", "--"),
    ],
)
def test_a_rows_environment_names_its_teacher(of, default, roles, taught):
    teaching = Teaching(of=of, default=default)
    assert "".join(teaching.role_of(environment, roles) or "-" for environment in (MATH, MCQA)) == taught


@cases("distillation.mistakes", "old", "new", "says")
def test_a_teacher_without_rows_and_rows_without_a_teacher_are_refused(refused, old, new, says):
    assert says in refused("tiny-ultra", (old, new))


def test_a_divergence_has_a_name():
    named = {"forward": 0, "reverse": 1, "jsd": 0.5}
    assert {name: DistillationLoss(kl_type=name).weight for name in named} == named
    assert DistillationLoss(kl_type="jsd", beta=0.1).weight == 0.1


def test_teachers_count_by_content_and_the_routing_by_name():
    config = resolve_stage(load_recipe(RECIPE), "student").values()
    assert "teachers" not in config
    assert config["distillation"]["of"] == {MATH: "reasoning", MCQA: "choice"}
    assert "backend" not in config["policy"]["generation"]


@pytest.fixture
def models(tmp_path):
    """A policy and two teachers of the same chat format, as files without weights."""
    config = {"vocab_size": 262, "max_position_embeddings": 96}
    for name in ("policy", "first", "second"):
        make_tokenizer().save_pretrained(tmp_path / name)
        write_json(tmp_path / name / "config.json", config)
    return tmp_path


@pytest.fixture
def unfit(models, monkeypatch):
    """What the preflight says of the teachers."""
    roles = {f"teachers.{name}": models / name for name in ("first", "second")}
    monkeypatch.setattr(Stage, "role_exports", roles, raising=False)
    stage = Stage(load_recipe(RECIPE), models, "student")
    return lambda: [*unfit_readers(stage, ChatFormat.of(models / "policy"))]


def another_vocabulary(folder):
    tokenizer = make_tokenizer(calls_tools=True)
    tokenizer.chat_template = make_tokenizer().chat_template
    tokenizer.save_pretrained(folder)


def another_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def another(**changes):
    return lambda folder: write_json(folder / "config.json", read_json(folder / "config.json") | changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (another_vocabulary, "the vocabulary (261 tokens, now "),
        (another_template, "the chat template (line 1 was "),
        (another(vocab_size=300), "vocab_size (262, now 300)"),
        (another(max_position_embeddings=32), "max_position_embeddings (32, fewer than the 64 tokens of a row)"),
        (another(text_config={"max_position_embeddings": 63}), "max_position_embeddings (63, fewer than the 64"),
    ],
)
def test_a_teacher_that_cannot_read_the_policys_tokens_is_refused_by_content(models, unfit, change, says):
    assert unfit() == []
    change(models / "second")
    (told,) = unfit()
    assert told.startswith("teachers.second cannot read what the policy writes: ") and says in told
    change(models / "first")
    assert [line.partition(" ")[0] for line in unfit()] == ["teachers.first", "teachers.second"]
    shutil.rmtree(models / "second")
    assert [line.partition(" ")[0] for line in unfit()] == ["teachers.first"], "the second is not made yet"
