"""Settings of rollouts: sampling, and the place of vLLM."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.recipe.sampling import Sampling
from scripts.recipe.strict import Strict, invalid


class VllmEngine(Strict):
    """vLLM on its GPUs. May change no weight but for rounding and random numbers."""

    gone: ClassVar[dict[str, str]] = {"enforce_eager": "leave it out; vLLM compiles on a GPU, and never on a CPU"}

    tensor_parallel_size: PositiveInt = Field(
        1, description="GPUs for each layer; colocated: processes; divides their number."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="vLLM's share of a GPU's memory; none: 0.3 colocated, 0.9 served."
    )
    enable_sleep_mode: bool = Field(False, description="Colocated: give the memory back during updates.")


class Colocated(Strict):
    """vLLM in the trainer's processes, on their GPUs, or served on a node."""

    gone: ClassVar[dict[str, str]] = {"resources": "leave it out; a vLLM server takes the stage's last node"}

    enabled: bool = Field(True, description="False: a vLLM server on the stage's last node.")


class Generation(Sampling):
    """Sampling of rollouts."""

    gone: ClassVar[dict[str, str]] = {"paged": "leave it out; backend: vllm samples by paged attention"}

    PLACING: ClassVar[tuple[str, ...]] = ("vllm_cfg", "colocated")
    """Settings that change no weight but for rounding and random numbers."""
    ADDED: ClassVar[tuple[str, ...]] = (
        "top_k",
        "min_p",
        "stop_token_ids",
        "max_tool_calling_iterations",
    )
    """Settings that a resolved config has only where they are not the default."""

    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="The sampler: the trained model, or vLLM with the trained model's weights of every step.",
    )
    vllm_cfg: VllmEngine = VllmEngine()
    colocated: Colocated = Colocated()

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "Generation":
        if self.backend != "vllm" and (self.vllm_cfg != VllmEngine() or self.colocated != Colocated()):
            raise invalid("vllm_cfg and colocated are for backend: vllm")
        return self
