"""How rows become text: the chat template that a stage names, and its variables."""

from typing import ClassVar

from pydantic import Field

from scripts.recipe.sampling import TemplateVariables
from scripts.recipe.strict import Strict

OWN = "default"
"""NeMo-RL's word for the tokenizer's own chat template."""


class Tokenizer(Strict):
    """How rows become text."""

    PLACING: ClassVar[tuple[str, ...]] = ()
    ADDED: ClassVar[tuple[str, ...]] = ("chat_template",)

    chat_template: str = Field(
        OWN,
        description="default: that of what the stage starts from. Or a file (Jinja), a model's (its folder, or its "
        "name on the hub) or one that TRL ships (qwen3_training), which is published with the stage. Another one than "
        "the parent's wants template_change: true.",
    )
    chat_template_kwargs: TemplateVariables = Field(
        {}, description="Variables of the chat template, such as enable_thinking."
    )
