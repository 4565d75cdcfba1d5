"""A model's shape: what its config and the headers of its tensors tell before it is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scripts.files import read_json
from scripts.model.hugging_face import A_ROW_A_TOKEN, tensors_of
from scripts.recipe.model import RandomModel

EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
EXPERT = ".experts."
BYTE_VOCABULARY = 261


@dataclass(frozen=True)
class Shape:
    """A decoder: its widths, and the shape of every tensor by name.

    `intermediate` is of one MLP or expert, of which a token passes `experts`.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    experts: int
    tensors: dict[str, list[int]]

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """The shape of a model in Hugging Face's format; KeyError where its config does not tell it."""
        whole = read_json(folder / "config.json")
        config: dict[str, Any] = whole | (whole.get("text_config") or {})
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
        tensors = {name: shape for name, (_, shape) in tensors_of(folder).items()}
        if config.get("tie_word_embeddings"):
            tensors = {name: shape for name, shape in tensors.items() if not name.endswith("lm_head.weight")}
        return cls(
            hidden=hidden,
            intermediate=(config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            experts=experts,
            tensors=tensors,
        )

    @classmethod
    def of_random(cls, model: RandomModel) -> Self:
        """The shape of a fresh model: a Llama with tied embeddings; its vision tower is left out."""
        hidden, inner = model.hidden_size, model.intermediate_size
        head_size = hidden // model.num_attention_heads
        key_values = head_size * model.num_key_value_heads
        layer = {
            **{f"self_attn.{name}_proj.weight": [rows, hidden] for name, rows in
               {"q": hidden, "k": key_values, "v": key_values, "o": hidden}.items()},
            **{f"mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")},
            "mlp.down_proj.weight": [hidden, inner],
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }  # fmt: skip
        layers = range(model.num_hidden_layers)
        tensors = {f"layers.{number}.{name}": shape for number in layers for name, shape in layer.items()}
        tensors |= {"embed_tokens.weight": [BYTE_VOCABULARY, hidden], "norm.weight": [hidden]}
        heads = model.num_attention_heads
        return cls(hidden, inner, len(layers), heads, model.num_key_value_heads, head_size, 1, tensors)

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings count once."""
        return sum(map(math.prod, self.tensors.values()))

    @property
    def embeddings(self) -> int:
        """Parameters of the matrices that have a row a token."""
        return sum(math.prod(self.tensors[name]) for name in self._rows_a_token)

    @property
    def vocabulary(self) -> int:
        """Rows of these matrices."""
        return max((self.tensors[name][0] for name in self._rows_a_token), default=0)

    @property
    def matrices(self) -> int:
        """Parameters of all other matrices, those of experts among them."""
        return sum(math.prod(shape) for name, shape in self.tensors.items() if len(shape) > 1) - self.embeddings

    @property
    def linear_layers(self) -> dict[str, list[int]]:
        """The matrices of linear layers, one for each expert."""
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.tensors.items()
            if len(shape) == 2 and name.endswith(".weight") and name not in self._rows_a_token
        }

    @property
    def norms(self) -> float:
        """Norms over the hidden state in a layer."""
        found = [name for name, shape in self.tensors.items() if shape == [self.hidden] and "norm" in name]
        return max(len(found) - 1, 0) / self.layers

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalised."""
        return any(name.endswith("q_norm.weight") for name in self.tensors)

    @property
    def of_experts(self) -> int:
        """Parameters of experts, which transformers holds as one matrix of all of a layer."""
        return sum(math.prod(shape) for name, shape in self.tensors.items() if EXPERT in name)

    @property
    def _rows_a_token(self) -> list[str]:
        return [name for name in self.tensors if name.endswith(A_ROW_A_TOKEN)]
