"""What samples the responses of a stage's rollouts: the trained model by transformers, or vLLM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.strict import invalid
from scripts.recipe.yaml_file import pinned_versions

if TYPE_CHECKING:
    from scripts.backends.trl.grpo import GrpoLoss
    from scripts.backends.trl.on_policy import Generation

CORRECTION = ("use_importance_sampling_correction", "truncated_importance_sampling_ratio")
"""Settings of the loss that weigh the trainer's over the sampler's probabilities."""


class Transformers:
    """The trained model samples by transformers."""

    needs_export: str | None = None
    """The reason why a fresh model cannot be the start; None: a fresh model can."""
    passes_over: tuple[str, ...] = CORRECTION
    """Settings of the loss that the sampler has no use for, so that a config lacks them."""

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """Return the pinned versions that decide the weights, of the packages of a training and of the sampler."""
        return pinned_versions("trl", packages)

    def python_on(self, vllm_python: str | None) -> str:
        """Return the Python that trains the stage; `vllm_python` is the site's with vLLM."""
        return "python"

    def given(self, generation: "Generation") -> frozenset[str] | None:
        """Return the settings that are always handed to the sampler, which takes others from the model's folder."""
        named = {"min_p"} if generation.min_p is not None else set()
        return frozenset({"temperature", "top_p", "top_k", "repetition_penalty"} | named)

    def refuse_loss(self, loss: "GrpoLoss") -> None:
        """Raise PydanticCustomError for a correction of probabilities that are the trainer's own."""
        if loss.use_importance_sampling_correction:
            raise invalid("loss_fn.use_importance_sampling_correction is for policy.generation.backend: vllm")

    def refuse_model(self, model: RandomModel | PretrainedModel, at: str) -> None:
        """Raise PydanticCustomError at the key `at` for a model that cannot be sampled."""


class Vllm(Transformers):
    """vLLM samples, with the trained model's weights of every step."""

    needs_export = "policy.generation.backend vllm starts from an export"
    passes_over = ()

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """Return the versions pinned in envs/vllm.txt."""
        return pinned_versions("vllm", (*packages, "vllm"))

    def python_on(self, vllm_python: str | None) -> str:
        """Return vLLM's Python, where the site names one."""
        return vllm_python or "python"

    def given(self, generation: "Generation") -> frozenset[str] | None:
        """Return None: vLLM takes no others than it is handed."""
        return None

    def refuse_loss(self, loss: "GrpoLoss") -> None:
        """Take every loss."""

    def refuse_model(self, model: RandomModel | PretrainedModel, at: str) -> None:
        """Refuse a fresh model that sees."""
        if isinstance(model, RandomModel) and model.vision is not None:
            raise invalid("vllm samples for models without vision only; make it transformers", at)


SAMPLERS = {"transformers": Transformers(), "vllm": Vllm()}
"""By the name that a recipe has (`policy.generation.backend`)."""
