"""Settings of rollouts: sampling, and the place of vLLM."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.recipe.sampling import Sampling
from scripts.recipe.strict import Strict, invalid


class VllmEngine(Strict):
    """vLLM on its GPUs. May change no weight but for rounding and random numbers."""

    tensor_parallel_size: PositiveInt = Field(1, description="GPUs for each layer; colocated: processes.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="vLLM's share of a GPU's memory; none: 0.3 colocated, 0.9 served."
    )
    enforce_eager: bool = Field(False, description="Compile nothing and capture no CUDA graphs; so on a CPU always.")
    enable_sleep_mode: bool = Field(False, description="Colocated: give the memory back during updates.")


class GenerationResources(Strict):
    """The share of a vLLM server."""

    gpus_per_node: PositiveInt | None = Field(None, description="GPUs; none: vllm_cfg.tensor_parallel_size.")
    num_nodes: Literal[1] | None = Field(
        None, description="1: a node of the stage for the server (TRL talks to one); none: GPUs of the trainer's node."
    )


class Colocated(Strict):
    """vLLM in the trainer's processes, on their GPUs, or served on further GPUs."""

    enabled: bool = Field(True, description="False: the stage starts, watches and ends a vLLM server.")
    resources: GenerationResources = GenerationResources()

    @model_validator(mode="after")
    def _shares_no_resources(self) -> "Colocated":
        if self.enabled and self.resources != GenerationResources():
            raise invalid("resources are for enabled: false; colocated vLLM has the trainer's")
        return self


class Generation(Sampling):
    """Sampling of rollouts."""

    PLACING: ClassVar[tuple[str, ...]] = ("vllm_cfg", "colocated")
    """Settings that change no weight but for rounding and random numbers."""
    ADDED: ClassVar[tuple[str, ...]] = (
        "top_k",
        "min_p",
        "stop_strings",
        "stop_token_ids",
        "paged",
        "max_tool_calling_iterations",
    )
    """Settings that a resolved config has only where they are not the default."""

    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="The sampler: the trained model, or vLLM with the trained model's weights of every step.",
    )
    paged: bool = Field(
        False, description="transformers: sample by paged attention, new rows in place of ended rows (text only)."
    )
    vllm_cfg: VllmEngine = VllmEngine()
    colocated: Colocated = Colocated()

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "Generation":
        if self.backend != "vllm" and (self.vllm_cfg != VllmEngine() or self.colocated != Colocated()):
            raise invalid("vllm_cfg and colocated are for backend: vllm")
        if self.backend == "vllm" and self.paged:
            raise invalid("paged is for backend: transformers; vLLM pages always")
        if self.paged and self.stop_strings:
            raise invalid("paged sampling knows no stop_strings; give stop_token_ids, or leave paged out")
        gpus = self.colocated.resources.gpus_per_node
        if gpus is not None and gpus % self.vllm_cfg.tensor_parallel_size:
            raise invalid("colocated.resources.gpus_per_node must be a multiple of vllm_cfg.tensor_parallel_size")
        return self
