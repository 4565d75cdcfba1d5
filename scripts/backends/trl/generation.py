"""Settings of rollouts: sampling, and vLLM."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.recipe.sampling import Sampling
from scripts.recipe.strict import Strict, invalid


class VllmEngine(Strict):
    """vLLM in the training processes, on their GPUs. May change no weight but for rounding and random numbers."""

    gone: ClassVar = {"enforce_eager": "leave it out; vLLM compiles on a GPU, and never on a CPU"}

    tensor_parallel_size: PositiveInt = Field(1, description="Processes that share an engine; divides their number.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """vLLM's share of a GPU's memory; none: 0.3."""
    enable_sleep_mode: bool = Field(False, description="Give the memory back during updates.")


class Generation(Sampling):
    """Sampling of rollouts."""

    gone: ClassVar = {
        "paged": "leave it out; backend: vllm samples by paged attention",
        "colocated": "leave it out; vLLM samples in the training processes (enabled: true)",
    }

    PLACING = ("vllm_cfg",)
    ADDED = ("top_k", "min_p", "stop_token_ids", "max_tool_calling_iterations")

    backend: Literal["transformers", "vllm"] = "transformers"
    """The sampler: the trained model, or vLLM with the trained model's weights of every step."""
    vllm_cfg: VllmEngine = VllmEngine()

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "Generation":
        if self.backend != "vllm" and self.vllm_cfg != VllmEngine():
            raise invalid("vllm_cfg is for backend: vllm")
        return self
