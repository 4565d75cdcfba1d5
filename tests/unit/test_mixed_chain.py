"""A chain of both backends: what stands between TRL and NeMo-RL, either way, before nodes are asked for."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.backends.by_name import backend_of
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.places import check_model
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.errors import UserError
from scripts.files import describe_files, write_json
from scripts.finding import Moment, ask
from scripts.model.processor import make_tokenizer
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.rows.chat_format import write_template
from scripts.stage.candidate import Candidate
from scripts.stage.publish import export_name, publish_export
from scripts.stage.stage import Stage
from scripts.train.preflight import changes_of_format, check_handover
from tests.cases import tables_of
from tests.conftest import ROOT

RECIPE = tables_of("mixed_chain")["recipe"]
SHAPES = {"model.embed_tokens.weight": (16, 8), "model.layers.0.weight": (8, 8), "lm_head.weight": (16, 8)}


def recipe_with(folder: Path, stages: dict | None = None, **changes):
    """The recipe with other sections, and with other settings of stages."""
    data = RECIPE | changes
    data["stages"] = {name: stage | (stages or {}).get(name, {}) for name, stage in RECIPE["stages"].items()}
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_recipe(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with its chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def export(tokenizer, tmp_path):
    """A function that exports a model of such tensors as a stage's."""
    import torch
    from safetensors.torch import save_file

    def write(stage: str, shapes: dict = SHAPES, vocabulary: int = 16, template: str | None = None) -> None:
        folder = tmp_path / stage / "exports/new"
        folder.mkdir(parents=True)
        for path in tokenizer.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        if template:
            write_template(folder, template)
        write_json(folder / "config.json", {"model_type": "llama", "vocab_size": vocabulary})
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
        files = describe_files(folder)
        folder.rename(folder.with_name(export_name(files)))
        publish_export(
            {"stage": stage, "step": 1, "identity": "0"}, files, tmp_path / stage / "hf", tmp_path / stage / "exports"
        )

    return write


WIDER = {name: (24, 8) if shape[0] == 16 else shape for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"shapes": dict(list(SHAPES.items())[:2])}, "has no lm_head.weight (1 missing, 0 more)"),
        (
            {"shapes": SHAPES | {"model.layers.0.weight": (8, 4)}},
            "model.layers.0.weight has the shape [8, 4], but [8, 8]",
        ),
        ({"shapes": WIDER}, "has 24 rows, but config.json's vocab_size is 16"),
        ({"shapes": WIDER, "vocabulary": 24}, "has the shape [24, 8], but [16, 8] in"),
    ],
    ids=["a tensor less", "another shape", "rows that pad the vocabulary", "another vocabulary"],
)
def test_an_export_of_nemo_rl_that_is_not_the_model_it_began_with_is_refused(export, tmp_path, damage, message):
    export("sft")
    export("rl", **damage)
    recipe = recipe_with(tmp_path)
    check_handover(Stage(recipe, tmp_path, "rl"))
    with pytest.raises(UserError, match=re.escape(message)):
        check_handover(Stage(recipe, tmp_path, "dpo"))


def test_an_export_of_trl_that_is_no_whole_model_is_refused_before_nemo_rl_gets_its_nodes(export, tmp_path):
    export("sft", vocabulary=20)
    with pytest.raises(UserError, match=r"has 16 rows, but config.json's vocab_size is 20"):
        check_handover(Stage(recipe_with(tmp_path), tmp_path, "rl"))
    shard = next(tmp_path.glob("sft/exports/*/model.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"model.safetensors: has \d+ bytes instead of \d+, by .*sft/hf/record.json"):
        check_handover(Stage(recipe_with(tmp_path), tmp_path, "rl"))


def test_another_chat_template_is_refused_both_ways(export, tmp_path):
    export("sft")
    export("rl", template="{{ messages }}")

    def changes(stages: dict | None, name: str) -> list[str]:
        stage = Stage(recipe_with(tmp_path, stages), tmp_path, name)
        return changes_of_format(stage, backend_of(stage.settings.made_by).chat_format(stage))

    said = {"rl": {"policy": RECIPE["stages"]["rl"]["policy"] | {"tokenizer": {"chat_template": "{{ messages }}"}}}}
    assert changes(None, "rl") == []
    for stages, stage, parent in ((said, "rl", "sft"), (None, "dpo", "rl")):
        (found,) = changes(stages, stage)
        assert f"otherwise than its parent {parent} trained: the chat template" in found
    assert changes(said, "dpo") == []


def test_stages_of_both_backends_are_scored_where_the_recipe_names_them(tmp_path):
    def scored_in(recipe: Recipe) -> list[str]:
        return [stage.name for stage in recipe.graph.order if stage.is_scored]

    assert scored_in(recipe_with(tmp_path)) == ["sft", "dpo"]
    both = {"max_new_tokens": 8, "stages": ["sft", "rl"]}
    assert scored_in(recipe_with(tmp_path, evaluation=both)) == ["sft", "rl"]
    with pytest.raises(UserError, match=r"evaluation.stages: no stage is named rll; did you mean rl?"):
        recipe_with(tmp_path, evaluation={"max_new_tokens": 8, "stages": ["rll"]})
    with pytest.raises(
        UserError, match=r"evaluation.held_out: is gone: leave it out; say `max_new_tokens` and `stages`"
    ):
        recipe_with(tmp_path, evaluation={"held_out": True})


def test_a_start_from_megatrons_weights_is_refused_with_what_to_do_instead(tmp_path):
    with pytest.raises(
        UserError, match=r"stages.rl.pretrained_checkpoint: is gone: leave it out; the stage starts from"
    ):
        recipe_with(tmp_path, {"rl": {"pretrained_checkpoint": True}})
    model = {"name": "/models/hf", "megatron": {"path": "/models/megatron"}}
    with pytest.raises(UserError, match=r": model.megatron: is gone: convert the checkpoint to Hugging Face's format"):
        recipe_with(tmp_path, model=model)


@pytest.mark.parametrize(("release", "reads"), [("v0.7.0", True), ("super-v3", False)])
def test_a_tokenizer_that_the_release_cannot_read_is_refused(export, tmp_path, release, reads):
    export("sft")
    recipe = recipe_with(tmp_path, release=release)
    runtime = runtime_of(recipe, "rl", load_site(ROOT / "config/sites/h100.yaml", recipe))
    found = [*check_model(StageContext(**vars(runtime), stage=Stage(recipe, tmp_path, "rl")))]
    assert [it.message.partition("; ")[0].partition("json: ")[2] for it in found if it.stops] == (
        [] if reads else ["transformers 5 wrote it, which transformers 4 of super-v3 cannot read"]
    )


def test_a_stage_of_trl_on_a_site_of_nemo_rl_is_told_that_it_leaves_the_gpus_idle(tmp_path):
    recipe = recipe_with(tmp_path)
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    stage = Stage(recipe, tmp_path, "sft")
    idle = Candidate.on(site.model_copy(update={"accelerator": "cpu"}), stage)
    (found,) = ask(backend_of("trl").checks(), idle, [Moment.START])
    assert "site h100 gives it nodes of 8 GPUs, and says accelerator: cpu" in found.message and not found.stops
    busy = Candidate.on(site.model_copy(update={"processes": 4}), stage)
    assert [*ask(backend_of("trl").checks(), busy, [Moment.START])] == []
