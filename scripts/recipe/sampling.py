"""How responses are sampled, by training stages and held-out scores alike."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from scripts.recipe.strict import Strict

TemplateVariables = dict[str, bool | int | float | str]


class Sampling(Strict):
    """What samplers are told."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: PositiveInt | None = Field(None, description="Sample among so many likeliest tokens; none: all.")
    min_p: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Sample among tokens that are at least so likely beside the likeliest (arXiv:2407.01082)."
    )
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Texts that end a response, and stay in it."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="Tokens that end a response besides the model's own."
    )
    max_new_tokens: PositiveInt
    max_tool_calling_iterations: PositiveInt | None = Field(
        None, description="How often a policy may call tools in a response, where there are any; none: any number."
    )
