"""Settings of chat templates and of sampling, in training and for held-out scores."""

import math
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from scripts.recipe.effect import Later
from scripts.recipe.strict import Place, Strict, invalid

OWN = "default"
"""NeMo-RL's word for the tokenizer's own chat template."""
TemplateVariables = dict[str, bool | int | float | str]
LEAST_TEMPERATURE = 1e-6
"""Logits divided by less leave the range of float32, so that nothing can be drawn."""


def is_temperature(value: float) -> bool:
    """Whether responses can be sampled at a temperature; 0 is greedy."""
    return value == 0 or (math.isfinite(value) and value >= LEAST_TEMPERATURE)


def _checked(temperature: float) -> float:
    """Refuse a temperature at which nothing can be drawn."""
    if not is_temperature(temperature):
        raise invalid(f"is {temperature:g}, at which nothing can be drawn; the least is {LEAST_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[NonNegativeFloat, AfterValidator(_checked)]
"""0, which is greedy, or a number from `LEAST_TEMPERATURE` on."""


class Sampling(Strict):
    """Settings of a sampler."""

    gone: ClassVar = {"stop_strings": "leave it out; stop_token_ids ends responses at tokens"}

    temperature: Annotated[PositiveFloat, AfterValidator(_checked)] = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Later[PositiveInt | None] = None
    """Sample among so many likeliest tokens; none: all."""
    min_p: Later[Annotated[float, Field(gt=0, lt=1)] | None] = None
    """Sample among tokens that are at least so likely beside the likeliest (arXiv:2407.01082)."""
    repetition_penalty: Later[PositiveFloat] = 1.0
    """Divide the logits of tokens that the prompt or the response has already (arXiv:1909.05858); 1: of none."""
    stop_token_ids: Later[list[NonNegativeInt]] = Field([])
    """Tokens that end a response besides the model's."""
    max_new_tokens: PositiveInt
    max_tool_calling_iterations: Later[PositiveInt | None] = None
    """How often a policy may call tools in a response, where there are any; none: any number."""

    @property
    def decoding(self) -> dict[str, Any]:
        """The settings of decoding, as records have them: no defaults but length, temperature and seed (none: 0)."""
        asked = {*Sampling.model_fields, "chat_template_kwargs"}
        always = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        more = self.model_dump(mode="json", include=asked, exclude_defaults=True)
        return more | always | {"seed": getattr(self, "seed", 0)}


def words_of_decoding(decoding: dict[str, Any]) -> str:
    """Say how a record's responses were sampled; the seed only where chance has a part."""
    settings = dict(decoding)
    temperature, length = settings.pop("temperature", 0), settings.pop("max_new_tokens", None)
    seed, top_p = settings.pop("seed", 0), settings.pop("top_p", 1)
    words = [f"temperature {temperature:g}", f"top_p {top_p:g}", f"seed {seed}"] if temperature else ["greedy"]
    words += [f"at most {length} tokens"] if length is not None else []
    words += [f"{name} {value}" for name, value in settings.items()]
    return ", ".join(words)


class Tokenizer(Strict):
    """Settings that turn rows into text."""

    chat_template: Later[Place] = Field(
        OWN,
        description="default: the template of the stage's start. Or a file (Jinja), a model's folder, or a "
        "template of TRL (qwen3_training), published with the stage. A template other than the "
        "parent's needs template_change: true.",
    )
    chat_template_kwargs: TemplateVariables = Field({})
    """Variables of the chat template, such as enable_thinking."""
