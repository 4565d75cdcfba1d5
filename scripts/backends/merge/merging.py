"""Settings of a merge of exports, and the fit of the parts."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from scripts.model.hugging_face import tensors_of
from scripts.recipe.effect import WithoutEffect
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.source import Share
from scripts.recipe.stage_settings import StageSettings, Surroundings
from scripts.recipe.strict import Name, Strict, invalid
from scripts.recipe.yaml_file import pinned_versions
from scripts.rows.chat_format import ChatFormat

MERGEABLE = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
"""Types of safetensors that can be merged, or must be equal: eight bits and fewer need scales beside them."""


class Merging(Strict):
    """A method of mergekit, under mergekit's names."""

    merge_method: Literal["linear", "slerp", "ties", "dare_ties", "dare_linear"] = "linear"
    """Mean (arXiv:2203.05482), arc between two; ties (arXiv:2306.01708) and dare (arXiv:2311.03099) need a base."""
    density: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of each part's changes of the base to keep: the largest (ties), or drawn (dare)."
    )

    @model_validator(mode="after")
    def _density_is_of_changes(self) -> "Merging":
        if self.has_base and self.density is None:
            raise invalid(f"{self.merge_method} needs density, the share of each part's changes to keep")
        if not self.has_base and self.density is not None:
            raise invalid(f"density is of ties and dare; {self.merge_method} merges all weights: leave it out")
        return self

    @property
    def has_base(self) -> bool:
        """Whether changes of a base are merged."""
        return self.merge_method not in ("linear", "slerp")


class MergeSettings(StageSettings):
    """A stage that merges exports of one shape."""

    rule = "merge"
    is_rewarded_here = False
    ROLES: ClassVar[tuple[str, ...]] = ("merge",)

    backend: Literal["trl"] = "trl"
    algorithm: Literal["merge"]
    merge: dict[Name, Share] = Field(min_length=2)
    """Shares by start. The first in the alphabet gives config, tokenizer and types of weights."""
    merging: Merging = Merging()
    blend: WithoutEffect[None] = None

    kind: ClassVar[None] = None
    rows_per_step: ClassVar[int] = 0
    samples_per_step: ClassVar[int] = 1
    max_length: ClassVar[int] = 0

    @field_validator("merge")
    @classmethod
    def _are_shares_of_one(cls, merge: dict[str, float]) -> dict[str, float]:
        if abs((total := math.fsum(merge.values())) - 1) > 1e-6:
            raise invalid(f"the shares sum to {total:.7g}; they are shares of 1")
        return merge

    @model_validator(mode="after")
    def _arc_has_two_ends(self) -> "MergeSettings":
        if self.merging.merge_method == "slerp" and len(self.merge) != 2:
            raise invalid(f"slerp merges two parts, not {len(self.merge)}; take linear, or merge merges")
        return self

    @property
    def made_by(self) -> str:
        """Return the package of scripts/backends that makes the stage."""
        return "merge"

    @property
    def parts(self) -> dict[str, float]:
        """Shares by role, in the order of mergekit's inputs: the alphabet's, since a config is stored in it."""
        return {f"merge.{name}": share for name, share in sorted(self.merge.items())}

    def planned_step(self, train_rows: int | None) -> int:
        """The step of the merged weights."""
        return 1

    @property
    def before(self) -> str | None:
        """The base, else the part with the largest share."""
        return self.parent if self.merging.has_base else max(self.merge, key=self.merge.__getitem__)

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return the versions pinned in envs/trl.txt."""
        return pinned_versions("trl", ("mergekit", "torch"))

    @property
    def takes_model(self) -> bool:
        """Whether a base is needed, which without a parent is the recipe's pretrained model."""
        return self.merging.has_base

    def first_model(self, model: RandomModel | PretrainedModel) -> dict[str, Any]:
        """Return no model: the roles are the start."""
        return {}

    def draws_by_seed(self, is_fresh: bool, parent: StageSettings | None = None) -> bool:
        """Whether the changes to keep are drawn."""
        return self.merging.merge_method.startswith("dare")

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError for a missing or an unused base."""
        method, at = self.merging.merge_method, around.at
        if self.merging.has_base and around.is_fresh:
            raise invalid(f"{method} merges changes of a base; name the base as parent", at)
        if not self.merging.has_base and self.parent is not None:
            raise invalid(f"{method} has no base; leave parent out, or make it a part of merge", f"{at}.parent")


def misfit(first: Path, *others: Path) -> str | None:
    """Return the first difference of exports in tensors, shapes or chat format; None where they can be merged."""
    wanted, chat_format = tensors_of(first), ChatFormat.of(first)
    for name, (dtype, _) in wanted.items():
        if dtype not in MERGEABLE:
            return f"{name} has the type {dtype} in {first}; merge the weights from before they were quantised"
    for other in others:
        found = tensors_of(other)
        for name in sorted(wanted.keys() | found.keys()):
            shapes = [tensors[name][1] if name in tensors else "missing" for tensors in (wanted, found)]
            if shapes[0] != shapes[1]:
                return f"{name} is {shapes[0]} in {first}, but {shapes[1]} in {other}; only one shape can be merged"
        if changes := chat_format.changes(ChatFormat.of(other)):
            return f"{other} has another chat format than {first}: {'; '.join(changes)}"
    return None
