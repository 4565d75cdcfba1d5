"""Settings of direct and mixed preference optimisation."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from scripts.backends.trl.algorithm import TrlConfig, TrlSettings, TrlTraining
from scripts.backends.trl.policy import Policy
from scripts.recipe.strict import Strict, invalid


class PreferencePolicy(Policy):
    """The policy of a preference stage."""

    train_global_batch_size: PositiveInt = Field(description="Rows, pairs or single answers, a step.")
    truncation_mode: Literal["keep_start"] | None = None
    """Keep the start of answers too long after their prompt; none: the row is refused."""


SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
Loss = Literal[
    "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", *SMOOTHED
]


class Dpo(Strict):
    """Direct preference optimisation (arXiv:2305.18290), pairs in file order."""

    ADDED = ("loss_type", "label_smoothing")

    max_num_steps: PositiveInt
    reference_policy_kl_penalty: PositiveFloat = Field(0.05, description="beta: the price of leaving the parent.")
    preference_loss_weight: NonNegativeFloat = 1.0
    sft_loss_weight: NonNegativeFloat = 0.0
    """Of the chosen answers' negative log-likelihood, mean over their tokens."""
    preference_average_log_probs: bool = False
    """Divide an answer's log-probability by the answer's length in the preference loss."""
    loss_type: Loss = Field("sigmoid", description="The preference loss, by TRL's name (docs/algorithms.md).")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
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


class PreferenceTraining(TrlTraining):
    """Pairs of answers, a reference; DPO's trainer, also of MPO."""

    trainer = "scripts.backends.trl.dpo_trainer"
    joined: ClassVar[bool] = False
    """Whether the model reads prompt and answer as one text."""
    sequences_per_row = 2
    has_reference = True

    policy: PreferencePolicy

    @property
    def needs_export(self) -> str | None:
        """Say why the stage cannot start from a fresh model."""
        return f"{self.algorithm} departs from a reference, which a fresh model is not"


class DpoTraining(PreferenceTraining):
    """Direct preference optimisation."""

    algorithm: Literal["dpo"]
    dpo: Dpo


class DpoConfig(TrlConfig, DpoTraining):
    """The resolved config of DPO."""


class DpoSettings(TrlSettings, DpoTraining):
    """A stage of direct preference optimisation."""

    config_model = DpoConfig


class MpoTraining(PreferenceTraining):
    """Mixed preference optimisation."""

    algorithm: Literal["mpo"]
    mpo: Mpo


class MpoConfig(TrlConfig, MpoTraining):
    """The resolved config of MPO."""


class MpoSettings(TrlSettings, MpoTraining):
    """A stage of mixed preference optimisation."""

    config_model = MpoConfig
