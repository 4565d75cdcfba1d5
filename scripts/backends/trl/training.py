"""The settings of backend `trl` by algorithm, and the resolved configs that stages train with."""

from typing import Literal

from pydantic import Field, model_validator

from scripts.backends.trl.algorithms import (
    Dpo,
    Grpo,
    GrpoLoss,
    GrpoPolicy,
    Mpo,
    PreferencePolicy,
    PromptData,
    Sft,
    SftPolicy,
)
from scripts.recipe.gym import Gym
from scripts.recipe.model import RandomModel
from scripts.recipe.stage import Training, TrainingConfig
from scripts.recipe.strict import invalid
from scripts.recipe.tokenizer import OWN


class TrlTraining(Training):
    """What all algorithms have in common."""

    backend: Literal["trl"] = "trl"
    policy: SftPolicy | PreferencePolicy | GrpoPolicy

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM samples the rollouts; envs/vllm.txt is what such a stage trains with."""
        return False

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.policy.train_global_batch_size

    @property
    def chat_template(self) -> str | None:
        """The chat template that it names, in a resolved config its text; None: that of what it starts from."""
        named = self.policy.tokenizer.chat_template
        return None if named == OWN else named

    @property
    def max_length(self) -> int:
        """Tokens of a row's prompt and response together, at most."""
        return self.policy.max_total_sequence_length

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return 1

    @property
    def rows_per_update(self) -> int:
        """Rows, pairs or completions of one update."""
        return self.policy.train_global_batch_size

    @property
    def sequences_per_row(self) -> int:
        """Return the token sequences of a row: 2 of a preference pair."""
        return 1

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that the stage started from."""
        return False

    @property
    def section(self) -> "Sft | Grpo | Dpo":
        """The settings of its algorithm."""
        return getattr(self, self.algorithm)

    def planned_step(self, train_rows: int | None) -> int:
        """The step at which the stage is done, whatever the rows."""
        return self.section.max_num_steps


class SftTraining(TrlTraining):
    """Supervised fine-tuning."""

    algorithm: Literal["sft"]
    sft: Sft
    policy: SftPolicy


class GrpoTraining(TrlTraining):
    """Reinforcement learning."""

    algorithm: Literal["grpo"]
    grpo: Grpo
    data: PromptData = PromptData()
    loss_fn: GrpoLoss = GrpoLoss()
    policy: GrpoPolicy
    gym: Gym | None = Field(None, description="None: the verifiers here reward the rows.")

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.grpo.num_prompts_per_step

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM samples the rollouts; otherwise the model that trains does."""
        return self.policy.generation.backend == "vllm"

    @property
    def samples_per_step(self) -> int:
        """Completions of one step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a KL penalty."""
        return self.loss_fn.reference_policy_kl_penalty > 0

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have."""
        return self.policy.max_total_sequence_length - self.policy.generation.max_new_tokens

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt that is trained on."""
        return self.data.max_input_seq_length or self.longest_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step, whose rollouts may be trained on in several batches."""
        return self.samples_per_step // self.rows_per_update

    @property
    def rows_per_update(self) -> int:
        """Completions of one update."""
        return self.policy.train_global_batch_size or self.samples_per_step

    @model_validator(mode="after")
    def _batches_add_up(self) -> "GrpoTraining":
        stated = self.policy.train_global_batch_size
        if stated is not None and self.samples_per_step % stated:
            raise invalid(
                f"policy.train_global_batch_size is {stated}, but num_prompts_per_step x num_generations_per_prompt = "
                f"{self.samples_per_step} is no multiple of it; leave it out for one update a step"
            )
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise invalid(
                "policy.generation.max_new_tokens leaves no room for a prompt in policy.max_total_sequence_length"
            )
        if self.policy.generation.paged and self.policy.precision != "float32":
            raise invalid(
                "policy.generation.paged is for policy.precision: float32; TRL would train in bfloat16 after it"
            )
        if (self.data.max_input_seq_length or 0) > self.longest_prompt:
            raise invalid(
                "data.max_input_seq_length is more than policy.max_total_sequence_length less "
                f"policy.generation.max_new_tokens leave, which is {self.longest_prompt}"
            )
        return self


class PreferenceTraining(TrlTraining):
    """What DPO and MPO have in common."""

    @property
    def sequences_per_row(self) -> int:
        """Return 2: the chosen and the rejected answer."""
        return 2

    @property
    def has_reference(self) -> bool:
        """Both losses compare the policy with its parent."""
        return True


class DpoTraining(PreferenceTraining):
    """Direct preference optimisation."""

    algorithm: Literal["dpo"]
    dpo: Dpo
    policy: PreferencePolicy


class MpoTraining(PreferenceTraining):
    """Mixed preference optimisation."""

    algorithm: Literal["mpo"]
    mpo: Mpo
    policy: PreferencePolicy


class TrlConfig(TrainingConfig):
    """The resolved config of a stage; `model` is there where it has no parent."""

    model: RandomModel | None = None


class SftConfig(TrlConfig, SftTraining):
    """Of supervised fine-tuning."""


class GrpoConfig(TrlConfig, GrpoTraining):
    """Of reinforcement learning."""


class DpoConfig(TrlConfig, DpoTraining):
    """Of direct preference optimisation."""


class MpoConfig(TrlConfig, MpoTraining):
    """Of mixed preference optimisation."""
