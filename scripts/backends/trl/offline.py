"""Settings of algorithms that learn from written answers: SFT, DPO and MPO, KTO, reward models."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from scripts.backends.trl.algorithm import Policy, TrlSettings
from scripts.recipe.effect import Later, WithoutEffect
from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.stop_when import StopWhen
from scripts.recipe.strict import Strict, invalid


class Validated(Strict):
    """When the held-out rows are measured, by NeMo-RL's names; a batch has train_global_batch_size rows.

    Measuring changes no weight.
    """

    val_period: WithoutEffect[int] = Field(
        0, ge=-1, description="Measure the held-out rows every so many steps; 0: never between."
    )
    val_batches: WithoutEffect[int] = Field(
        -1, ge=-1, description="Batches of held-out rows, the first of the split; -1: all."
    )
    val_at_start: WithoutEffect[bool] = Field(True, description="Measure them before the first step.")
    val_at_end: WithoutEffect[bool] = Field(
        True, description="Measure them after the last step, and at checkpointing.keep_steps."
    )

    @property
    def validates(self) -> bool:
        """Whether anything is measured."""
        is_asked = self.val_period > 0 or self.val_at_start or self.val_at_end
        return is_asked and self.val_batches != 0


class WrittenSettings(TrlSettings):
    """A stage that trains on written answers, whose held-out rows are measured."""

    stop_when: Later[StopWhen | None] = Field(
        None, description="End early by the held-out rows, and publish the best checkpoint (docs/evaluation.md)."
    )

    def _refuse_misfits(self) -> None:
        if self.stop_when is None:
            return
        known = ["validation_loss", *self.figures]
        if self.stop_when.metric not in known:
            raise invalid(f"{self.algorithm} measures {', '.join(known)}, not {self.stop_when.metric}", key="stop_when")
        if self.section.val_period <= 0 or self.section.val_batches == 0:
            says = f"needs {self.algorithm}.val_period, the steps between two measurements"
            raise invalid(says, key="stop_when")

    @property
    def validates(self) -> bool:
        """Whether anything is measured."""
        return self.section.validates

    @property
    def stopping(self) -> StopWhen | None:
        """What ends the stage early."""
        return self.stop_when


class SftPolicy(Policy):
    """The policy of a supervised stage."""

    gone: ClassVar = {"sequence_packing": "leave it out; train_micro_batch_size: 1 pads nothing"}

    train_global_batch_size: PositiveInt = Field(description="Rows a step.")


class Sft(Validated):
    """Supervised fine-tuning on the assistant's tokens."""

    max_num_steps: PositiveInt
    assistant_only_loss: Later[bool] = Field(
        False,
        description="Learn every message of the assistant; false: the last alone. Needs {% generation %} in the "
        "chat template, or rows whose tokens prove every message's begin and end.",
    )


class SftSettings(WrittenSettings):
    """A stage of supervised fine-tuning."""

    algorithm: Literal["sft"]
    sft: Sft
    policy: SftPolicy


class PreferencePolicy(Policy):
    """The policy of a preference stage."""

    train_global_batch_size: PositiveInt = Field(description="Rows, pairs or single answers, a step.")
    truncation_mode: Later[Literal["keep_start"] | None] = None
    """Keep the start of answers too long after their prompt; none: the row is refused."""


SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
Loss = Literal[
    "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", *SMOOTHED
]


class Dpo(Validated):
    """Direct preference optimisation (arXiv:2305.18290), on pairs of answers."""

    max_num_steps: PositiveInt
    reference_policy_kl_penalty: PositiveFloat = Field(0.05, description="beta: the price of leaving the parent.")
    preference_loss_weight: NonNegativeFloat = 1.0
    sft_loss_weight: NonNegativeFloat = 0.0
    """Of the chosen answers' negative log-likelihood, mean over their tokens."""
    preference_average_log_probs: bool = False
    """Divide an answer's log-probability by the answer's length in the preference loss."""
    loss_type: Later[Loss] = Field("sigmoid", description="The preference loss, by TRL's name (docs/algorithms.md).")
    label_smoothing: Later[float] = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round, of robust, exo_pair, aot and aot_unpaired."""

    @model_validator(mode="after")
    def _fits_its_loss(self) -> "Dpo":
        if self.preference_average_log_probs and self.loss_type != "sigmoid":
            raise invalid(f"preference_average_log_probs is for loss_type: sigmoid, not {self.loss_type}; leave it out")
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise invalid(f"label_smoothing is for loss_type {', '.join(SMOOTHED)}; leave it out")
        if not self.label_smoothing and self.loss_type in ("robust", "exo_pair"):
            raise invalid(f"loss_type {self.loss_type} needs a label_smoothing above 0")
        return self

    @model_validator(mode="after")
    def _learns_something(self) -> "Dpo":
        weights = [name for name in type(self).model_fields if name.endswith("_loss_weight")]
        if not any(getattr(self, name) for name in weights):
            raise invalid(f"nothing would be learnt: {', '.join(weights)} are all 0")
        return self


class Mpo(Dpo):
    """Mixed preference optimisation (arXiv:2411.10442): which answer is better, how good each is, how it is made."""

    preference_loss_weight: NonNegativeFloat = 0.8
    bco_loss_weight: NonNegativeFloat = 0.2
    """Of the binary classifier loss (BCO, arXiv:2404.04656), without a reward shift."""
    sft_loss_weight: NonNegativeFloat = 1.0
    """Of the chosen answers' negative log-likelihood, mean over their tokens."""


class PreferenceSettings(WrittenSettings):
    """Pairs of answers, a reference; DPO's trainer, also of MPO."""

    joined: ClassVar[bool] = False
    """Whether the model reads prompt and answer as one text."""
    sequences_per_row = 2
    has_reference = True
    metrics = TrlSettings.metrics | {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    figures = ("validation_accuracy", "validation_margin")

    policy: PreferencePolicy

    @property
    def needs_export(self) -> str | None:
        """Say why the stage cannot start from a fresh model."""
        return f"{self.algorithm} departs from a reference, which a fresh model is not"


class DpoSettings(PreferenceSettings):
    """A stage of direct preference optimisation."""

    algorithm: Literal["dpo"]
    dpo: Dpo


class MpoSettings(PreferenceSettings):
    """A stage of mixed preference optimisation."""

    algorithm: Literal["mpo"]
    mpo: Mpo


class Kto(Validated):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), on single answers with a label."""

    max_num_steps: PositiveInt
    reference_policy_kl_penalty: PositiveFloat = Field(0.1, description="beta: the price of leaving the parent.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """By TRL's name; apo_zero_unpaired (arXiv:2408.06266) compares with the parent's answer, not with the step's KL."""
    desirable_weight: PositiveFloat = Field(1.0, description="Of wanted answers, where these are fewer or more.")
    undesirable_weight: PositiveFloat = 1.0


class KtoSettings(PreferenceSettings):
    """A stage of KTO."""

    figures = ("validation_margin",)
    sequences_per_row = 1
    least_rows = 2  # the KL of the step is measured by other pairs of prompt and answer

    algorithm: Literal["kto"]
    kto: Kto


class Reward(Validated):
    """A reward model of a new head on the parent, by the Bradley-Terry loss (arXiv:2203.02155), on pairs of answers."""

    max_num_steps: PositiveInt
    center_rewards_coefficient: NonNegativeFloat = Field(
        0.0, description="Weight of a pair's squared sum of rewards, for a mean of 0 (arXiv:2312.09244)."
    )


class RewardSettings(PreferenceSettings):
    """A stage that trains a reward model."""

    answers_prompts = False
    has_reference = False
    joined = True
    metrics = TrlSettings.metrics | {"accuracy": "accuracy", "margin": "margin"}

    algorithm: Literal["reward"]
    reward: Reward

    @property
    def needs_export(self) -> str | None:
        """Say why the stage cannot start from a fresh model."""
        return "a reward model is a new head on a trained model"

    def _refuse_misfits(self) -> None:
        if self.policy.lora is not None:
            raise invalid("policy.lora is not for reward models, whose new head it would not train; leave it out")

    def draws_by_seed(self, is_fresh: bool, parent: StageSettings | None = None) -> bool:
        """Whether the head is new, or rows are shuffled."""
        has_head = parent is not None and not parent.answers_prompts
        return not has_head or super().draws_by_seed(is_fresh, parent)
