"""Settings of KTO."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from scripts.backends.trl.algorithm import TrlConfig, TrlSettings
from scripts.backends.trl.dpo import PreferenceTraining
from scripts.recipe.strict import Strict


class Kto(Strict):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), answers in file order."""

    max_num_steps: PositiveInt
    reference_policy_kl_penalty: PositiveFloat = Field(0.1, description="beta: the price of leaving the parent.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """By TRL's name; apo_zero_unpaired (arXiv:2408.06266) compares with the parent's answer, not with the step's KL."""
    desirable_weight: PositiveFloat = Field(1.0, description="Of wanted answers, where these are fewer or more.")
    undesirable_weight: PositiveFloat = 1.0


class KtoTraining(PreferenceTraining):
    """Single answers with a label, a reference."""

    trainer = "scripts.backends.trl.kto_trainer"
    sequences_per_row = 1

    algorithm: Literal["kto"]
    kto: Kto


class KtoConfig(TrlConfig, KtoTraining):
    """The resolved config of KTO."""


class KtoSettings(TrlSettings, KtoTraining):
    """A stage of KTO."""

    config_model = KtoConfig
