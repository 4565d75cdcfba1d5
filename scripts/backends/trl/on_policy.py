"""Settings of algorithms that train on responses sampled from the policy, and of distillation; grpo.py has GRPO's."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.backends.trl.algorithm import Policy, TrainingData, TrlSettings
from scripts.backends.trl.sampler import SAMPLERS, Transformers
from scripts.recipe.effect import Later, WithoutEffect
from scripts.recipe.expand import Start
from scripts.recipe.sampling import Sampling
from scripts.recipe.stage_settings import StageSettings, Surroundings, Teaching
from scripts.recipe.strict import Name, Strict, invalid


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

    backend: Later[Literal["transformers", "vllm"]] = "transformers"
    """The sampler: the trained model, or vLLM with the trained model's weights of every step."""
    vllm_cfg: WithoutEffect[VllmEngine] = VllmEngine()

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "Generation":
        if self.backend != "vllm" and self.vllm_cfg != VllmEngine():
            raise invalid("vllm_cfg is for backend: vllm")
        return self


class RolloutPolicy(Policy):
    """A policy whose responses are sampled."""

    generation: Generation


class PromptData(TrainingData):
    """The rows of the split to train on, and how they are taken."""

    max_input_seq_length: PositiveInt | None = None
    """Leave out rows with longer prompts; none: a prompt too long for the sequence is refused."""


class RolloutSettings(TrlSettings):
    """A stage that trains on sampled responses."""

    metrics = TrlSettings.metrics | {
        "completions/mean_length": "response_length_mean",
        "completions/max_length": "response_length_max",
        "completions/clipped_ratio": "truncation_rate",
    }

    plays_tools: ClassVar[bool] = True
    """Whether responses may have turns with an environment's tools."""

    data: PromptData = PromptData()
    policy: RolloutPolicy

    @property
    def sampler(self) -> Transformers:
        """What samples the rollouts."""
        return SAMPLERS[self.policy.generation.backend]

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM samples the rollouts instead of the trained model."""
        return self.policy.generation.backend == "vllm"

    @property
    def sampling_given(self) -> frozenset[str] | None:
        """The settings that TRL always hands to the sampler."""
        return self.sampler.given(self.policy.generation)

    @property
    def rows_per_step(self) -> int:
        """Prompts in a step."""
        return self.section.num_prompts_per_step

    @property
    def shared_by_processes(self) -> dict[str, int | None]:
        """The prompts of a step, each taken with all its responses."""
        return {f"{self.algorithm}.num_prompts_per_step": self.rows_per_step}

    @property
    def needs_export(self) -> str | None:
        """The reason why a fresh model cannot be the start; None: a fresh model can."""
        return self.sampler.needs_export or super().needs_export

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt, at most."""
        return self.policy.max_total_sequence_length - self.policy.generation.max_new_tokens

    @property
    def longest_row(self) -> int:
        """Tokens of a trained prompt, at most."""
        return self.data.max_input_seq_length or self.longest_prompt

    def _refuse_misfits(self) -> None:
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise invalid(
                "policy.generation.max_new_tokens leaves no room for a prompt in policy.max_total_sequence_length"
            )
        if (self.data.max_input_seq_length or 0) > self.longest_prompt:
            raise invalid(
                "data.max_input_seq_length is more than policy.max_total_sequence_length less "
                f"policy.generation.max_new_tokens leave, which is {self.longest_prompt}"
            )

    def draws_by_seed(self, is_fresh: bool, parent: StageSettings | None = None) -> bool:
        """Responses are sampled."""
        return True

    def make_small(self, values: dict[str, Any], prompts: int, starts: int) -> None:
        """Let a resolved config's values take few prompts a step; `starts`: the models that the stage needs besides."""
        values[self.algorithm]["num_prompts_per_step"] = min(self.rows_per_step, prompts)

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return the versions pinned for the sampler."""
        return self.sampler.versions(self.packages)

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where the recipe's model or blend does not fit the backend."""
        super().check_in(around)
        self.sampler.refuse_model(around.model, f"{around.at}.policy.generation.backend")

    def python_on(self, vllm_python: str | None) -> str:
        """Return the Python that trains the stage."""
        return self.sampler.python_on(vllm_python)


class Distillation(Teaching):
    """On-policy distillation (arXiv:2306.13649): the student's own responses, a teacher's word on every token."""

    num_prompts_per_step: PositiveInt = Field(description="Prompts in a step, with a response each.")
    max_num_steps: PositiveInt


class DistillationLoss(Strict):
    """The divergence of teacher and student over the whole vocabulary, mean over the tokens of a step's responses."""

    kl_type: Literal["forward", "reverse", "jsd"] = "reverse"
    """Forward KL(teacher, student); reverse KL(student, teacher) (MiniLLM, arXiv:2306.08543); or generalized JSD."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of jsd, the teacher's share of the mixture; near 0 it is like forward, near 1 like reverse; none: 0.5."""

    @property
    def weight(self) -> float:
        """TRL's `beta`."""
        return {"forward": 0.0, "reverse": 1.0}.get(self.kl_type, self.beta or 0.5)

    @model_validator(mode="after")
    def _fits_together(self) -> "DistillationLoss":
        if self.beta is not None and self.kl_type != "jsd":
            raise invalid("beta is for kl_type: jsd; leave it out")
        return self


class DistillationSettings(RolloutSettings):
    """A stage of distillation."""

    ROLES = ("teachers",)
    plays_tools = False

    algorithm: Literal["distillation"]
    distillation: Distillation
    loss_fn: DistillationLoss = DistillationLoss()
    teachers: WithoutEffect[dict[Name, Start]] = Field({}, description="The teachers' starts by role, such as stages.")

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where recipe and stage do not fit, or teachers and environments do not."""
        super().check_in(around)
        self.distillation.check_in(around, self.blend, self.teachers)

    def make_small(self, values: dict[str, Any], prompts: int, starts: int) -> None:
        """Take few prompts a step, but one of each teacher."""
        values[self.algorithm]["num_prompts_per_step"] = max(prompts, starts)

    def frozen_bytes(self, of_roles: list[int], own: int, width: int, on_gpu: bool) -> dict[str, float]:
        """Return the bytes of the largest teacher, the one in memory; none at hand is taken for the student's size."""
        return {"teacher": (2 if on_gpu else width) * max(of_roles, default=own)}
