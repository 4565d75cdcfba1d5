"""What a model's files tell is refused when a recipe is planned, without transformers, as it is when it is prepared."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.backends.trl.checks import check_tokens
from scripts.backends.trl.versions import missing_reporter
from scripts.commands.checks import findings
from scripts.commands.project import Project
from scripts.finding import Finding, Moment
from scripts.model import trainable
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.model import PretrainedModel
from scripts.stage.candidate import Candidate
from tests.cases import cases
from tests.conftest import ROOT, refusal
from tests.pretrained import save_pretrained
from tests.stages import ready_stage

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="envs/trl.txt is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trainable") / "model"
    save_pretrained("qwen3", path)
    return path


@pytest.fixture
def copied(tmp_path, folder):
    """A copy of the model with other settings in one of its files, and more tokens in its tokenizer alone."""

    def copy(file: str = "config.json", tokens: tuple[str, ...] = (), pad: str | None = None, **settings) -> Path:
        path = shutil.copytree(folder, tmp_path / "copy") / file
        if tokens:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path.parent)
            tokenizer.add_tokens([*tokens], special_tokens=True)
            if pad:
                tokenizer.pad_token = pad
            tokenizer.save_pretrained(path.parent)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | settings))
        return path.parent

    return copy


def planned(model: Path, results: Path) -> list[str]:
    """What a dry run refuses of a recipe on a model."""
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml", model=str(model))
    site = load_site(ROOT / "config/sites/laptop.yaml", recipe)
    return [finding.line for finding in findings(Project(recipe, site, results), Moment.READ)]


@cases("pretrained.not_trained", "config", "message")
def test_a_plan_refuses_what_is_not_trained(tmp_path, copied, config, message):
    (says,) = planned(copied(**config), tmp_path / "results")
    assert re.search(f"^model.name: .*: {message}", says)


def test_a_sound_model_and_one_that_was_exported_are_not_refused(tmp_path, folder, copied):
    assert planned(folder, tmp_path / "results") == []
    record = tmp_path / "results/model/hf/record.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert planned(copied(quantization_config={"quant_method": "fp8"}), tmp_path / "results") == []


def test_a_pad_token_without_a_row_of_the_embedding_is_named_with_its_number(tmp_path, folder, copied):
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    (says,) = planned(copied(tokens=("[PAD]",), pad="[PAD]"), tmp_path / "results")
    assert f"the pad token '[PAD]' has the number {rows}, but the embedding has {rows} rows" in says
    other = PretrainedModel(name=str(tmp_path / "copy"), pad_token="<|endoftext|>")
    trainable.check_files(other, tmp_path / "copy")


def test_a_token_that_only_the_template_prints_counts_and_one_that_nobody_uses_does_not(tmp_path, copied):
    spare = copied(tokens=("<|spare|>",))
    assert planned(spare, tmp_path / "results") == []
    path = spare / "chat_template.jinja"
    path.write_text("{% if tools %}<|spare|>{% endif %}" + path.read_text())
    assert planned(spare, tmp_path / "results") == [], "a turn of the template that no row needs to take"
    path.write_text("<|spare|>" + path.read_text())
    (says,) = planned(spare, tmp_path / "results")
    assert "the chat template prints '<|spare|>', which has the number" in says


def test_rows_that_hold_a_token_without_a_row_are_named(tmp_path, copied):
    spare = copied(tokens=('<|a"b|>',))
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml", model=str(spare))
    said = {"role": "assistant", "content": "3"}
    asked = [{"role": "user", "content": text} for text in ("1+2?", 'a <|a"b|> in a text?')]
    stage = ready_stage(recipe, tmp_path / "results", "sft", [{"messages": [each, said]} for each in asked])
    assert [*check_tokens(Candidate(stage))] == []
    (tmp_path / "results/model/hf").mkdir(parents=True)
    (tmp_path / "results/model/hf/model").symlink_to(spare)
    found, _ = check_tokens(Candidate(stage))
    assert found.message.startswith(
        f"{stage.train_split}:2: holds '<|a\"b|>', which the tokenizer takes for the token of number "
    )


@pytest.mark.parametrize(
    ("templates", "says"),
    [
        (
            [{"name": "default", "template": "a"}, {"name": "default", "template": "b"}],
            "2 chat templates named default",
        ),
        ([{"name": "rag", "template": "a"}], "holds chat templates named rag, none default"),
        (None, "has no chat template; name one as model.chat_template"),
    ],
)
def test_templates_of_which_none_or_several_are_meant_are_refused(tmp_path, copied, templates, says):
    model = copied("tokenizer_config.json", chat_template=templates)
    (model / "chat_template.jinja").unlink()
    assert says in refusal(trainable.check_files, PretrainedModel(name=str(model)), model)
    named = PretrainedModel(name=str(model), chat_template="{{ messages }}")
    trainable.check_files(named, model)


def test_the_kinds_are_those_that_transformers_imports():
    from transformers.models.auto import configuration_auto, modeling_auto

    assert trainable._listed(*trainable.KINDS).keys() == configuration_auto.CONFIG_MAPPING_NAMES.keys()
    assert trainable._listed(*trainable.DECODERS) == dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_planning_imports_neither_torch_nor_transformers(folder, tmp_path):
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_trainable import planned\n"
        f"assert planned(Path({str(folder)!r}), Path({str(tmp_path)!r})) == []\n"
        "assert not {'torch', 'transformers', 'trl'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_package_that_reports_need_is_named_before_anything_starts(monkeypatch, tmp_path, folder):
    assert missing_reporter("/another/python", ["trackio"]) is None
    monkeypatch.setattr("scripts.backends.trl.versions.version_of", lambda name: None if name == "trackio" else "1")
    assert missing_reporter("python", ["tensorboard"]) is None
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml", model=str(folder))
    site = load_site(ROOT / "config/sites/laptop.yaml", recipe).model_copy(update={"report_to": ["trackio"]})
    says = "report_to of the site names trackio, which is not installed: python -m pip install trackio"
    assert findings(Project(recipe, site, tmp_path), Moment.READ) == [Finding(says)]
