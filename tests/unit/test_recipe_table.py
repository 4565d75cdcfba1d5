"""docs/recipes.md is what the recipes and docs/recipes.yaml say."""

from scripts.backends.nemo_rl.table import DOCUMENT, About, Published, document, load_texts, section
from scripts.recipe.load import load_recipe
from tests.conftest import ROOT

STEP = ROOT / "config/recipes/steps-rlvr.yaml"


def said(**figures: str) -> str:
    """The section of a recipe of whose stage a document gives these figures; the reason for any other is `because`."""
    published = Published(source="A guide", stages=["rlvr"], figures=figures, why=dict.fromkeys(figures, "because"))
    return section("steps-rlvr", load_recipe(STEP), About(about=["It is."], published=[published]))


def test_the_document_is_what_the_recipes_say():
    assert DOCUMENT.read_text() == document(), "run: python -m scripts.backends.nemo_rl.table"


def test_every_recipe_of_nemo_rl_is_in_it():
    recipes = {path.stem for path in (ROOT / "config/recipes").glob("*.yaml") if load_recipe(path).release}
    assert set(load_texts()[1]) == recipes and "tiny" not in recipes


def test_a_published_figure_stands_beside_ours():
    text = said(batch="128", **{"sequence length": "4K"})
    assert "| batch | 128 (128) |" in text
    assert "| sequence length | 4096 (4K) |" in text
    assert "because" not in text


def test_a_figure_that_differs_is_marked_and_explained():
    text = said(batch="32", image="another:v1")
    assert "| batch | 128 (≠ 32)[^steps-rlvr-1] |" in text
    assert "| image | `nvcr.io/nvidia/nemo-rl:v0.6.0` (≠ `another:v1`)[^steps-rlvr-1] |" in text
    assert text.endswith("[^steps-rlvr-1]: because"), "one note for one reason"


def test_every_reason_is_shown():
    text = " ".join(document().split())
    for name, about in load_texts()[1].items():
        for why in (why for source in [*about.published, *about.nodes] for why in source.why.values()):
            assert " ".join(why.split()) in text, f"{name}: {why} explains a difference that there is not"


def test_stages_that_are_alike_share_a_column():
    recipe, about = load_recipe(ROOT / "config/recipes/super3.yaml"), load_texts()[1]["super3"]
    assert "| rlvr1, rlvr2, rlvr3 | swe1 | swe2 | rlhf |" in section("super3", recipe, about)
