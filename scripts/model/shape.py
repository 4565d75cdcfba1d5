"""A decoder's shape, from its config and tensor headers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scripts.model.hugging_face import A_ROW_A_TOKEN, OUTPUT, tensors_of, text_config_of
from scripts.recipe.model import RandomModel

EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
BYTE_VOCABULARY = 261


@dataclass(frozen=True)
class Shape:
    """A decoder's widths; `intermediate` of one MLP or expert, of `experts` a token; `linear_layers` are (out, in)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    experts: int
    vocabulary: int
    context: int | None
    parameters: int
    linear_layers: list[list[int]]

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read the shape of a model in Hugging Face's format; KeyError where its config lacks a width."""
        config = text_config_of(folder)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
        tied = (OUTPUT,) if config.get("tie_word_embeddings") else ()
        tensors = {name: shape for name, (_, shape) in tensors_of(folder).items() if not name.endswith(tied)}
        return cls(
            hidden=hidden,
            intermediate=(config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            experts=experts,
            vocabulary=config["vocab_size"],
            context=config.get("max_position_embeddings"),
            parameters=sum(map(math.prod, tensors.values())),
            linear_layers=[
                shape for name, shape in tensors.items() if len(shape) == 2 and not name.endswith(A_ROW_A_TOKEN)
            ],
        )


def fresh_parameters(model: RandomModel) -> int:
    """Count the parameters of a fresh Llama with tied embeddings, its vision tower left out."""
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    attention = 2 * hidden**2 * (1 + groups / heads)
    layer = round(attention) + 3 * hidden * model.intermediate_size + 2 * hidden
    return layer * model.num_hidden_layers + (BYTE_VOCABULARY + 1) * hidden
