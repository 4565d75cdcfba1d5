"""The model at a recipe's start."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from scripts.errors import UserError
from scripts.recipe.strict import Place, Strict, invalid

REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
MODEL = "model"
"""The name of a recipe's own pretrained model, and its folder beside the stages'."""
Width, Layers = Annotated[PositiveInt, Field(le=1 << 17)], Annotated[PositiveInt, Field(le=1000)]


def _named(name: str) -> str:
    """Refuse a name that is neither a folder's nor a repository's."""
    if not name.startswith(("/", "./")) and not os.path.isdir(name) and not REPOSITORY.fullmatch(name):  # noqa: PTH112
        raise invalid(f"{name} is neither a folder, as /... or ./..., nor a repository of the hub, as org/name")
    return name


class ThoughtMarks(Strict):
    """The texts around a model's thoughts, such as <think> and </think>."""

    begin: Annotated[str, Field(min_length=1)]
    end: Annotated[str, Field(min_length=1)]


class Spoken(Strict):
    """What a model's recipe tells of its responses and its chat template, where the files do not."""

    thoughts: ThoughtMarks | Literal["none"] | None = Field(
        None,
        exclude=True,
        description="The marks around the model's thoughts, or none: all that it writes is its answer. Left out: the "
        "marks of the known families.",
    )
    template_date: date | None = Field(
        None,
        exclude=True,
        description="The date that a chat template prints as the day's; left out: 2024-07-26, as in Llama 3's.",
    )

    @property
    def reading(self) -> dict[str, Any]:
        """Return what is told, by name, as records have it; left out what is not."""
        told = {"thoughts": self.thoughts, "template_date": self.template_date}
        plain = {name: value.model_dump() if isinstance(value, ThoughtMarks) else value for name, value in told.items()}
        return {name: str(value) if name == "template_date" else value for name, value in plain.items() if value}


class RandomVision(Strict):
    """A vision tower whose patches stand before the decoder as tokens, as in LLaVA (arXiv:2304.08485)."""

    image_size: Width = Field(description="Pixels of a side, to which every picture is scaled.")
    patch_size: Width
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width


class RandomModel(Spoken):
    """A Llama-shaped decoder with random weights and a byte-level tokenizer, for stages without a parent."""

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width
    initializer_range: PositiveFloat = 0.02
    rope_theta: PositiveFloat = 10000.0
    vision: RandomVision | None = None
    """None: the model sees no pictures."""
    tools: bool = Field(False, exclude_if=lambda tools: not tools)
    """Whether its chat template knows calls of tools and their results."""

    @property
    def folder(self) -> None:
        """No folder: the weights are made when the first stage trains."""
        return None

    @property
    def may_see(self) -> bool:
        """Whether it has a vision tower."""
        return self.vision is not None

    @property
    def as_start(self) -> dict[str, "PretrainedModel"]:
        """No start: stages make the model themselves."""
        return {}

    def replaced_by(self, name: str, recipe: Path) -> "PretrainedModel":
        """Raise UserError: the recipe's stages make their model."""
        raise UserError(
            f"model={name} is for recipes that start from a pretrained model, such as "
            f"config/recipes/tiny-pretrained.yaml; {recipe} makes a model"
        )


class PretrainedModel(Spoken):
    """A model in Hugging Face's format, the start of stages without a parent."""

    gone: ClassVar = {
        "megatron": "convert the checkpoint to Hugging Face's format (docs/nemo_rl.md), and name that folder"
    }

    name: Annotated[Place, AfterValidator(_named)]
    """A folder (its path begins with / or ./) or a repository of the hub."""
    revision: str | None = None
    """Commit of the repository."""
    chat_template: Place | None = None
    """A file with the chat template (Jinja), instead of the model's, if any."""
    eos_token: str | None = None
    """The token that ends an answer, instead of the tokenizer's."""
    pad_token: str | None = None
    """The token that fills a batch, where the tokenizer has none."""
    base_model: str | None = Field(None, exclude=True, description="The hub's name of a folder's model, for the cards.")
    attribution: str | None = Field(None, exclude=True, description="A sentence on its makers and licence, for cards.")

    @property
    def may_see(self) -> bool:
        """Yes, as far as the recipe tells."""
        return True

    @property
    def as_start(self) -> dict[str, "PretrainedModel"]:
        """The model by its name among the recipe's starts."""
        return {MODEL: self}

    def replaced_by(self, name: str, recipe: Path) -> "PretrainedModel":
        """Return another model in place of the recipe's, by its name on the hub or its folder."""
        return PretrainedModel(name=name)

    @property
    def folder(self) -> Path | None:
        """The model's folder; None: a repository of the hub."""
        return Path(self.name) if self.name.startswith(("/", "./")) else None
