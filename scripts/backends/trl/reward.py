"""Settings of reward models."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from scripts.backends.trl.algorithm import TrlConfig, TrlSettings, TrlTraining
from scripts.backends.trl.dpo import PreferenceTraining
from scripts.recipe.strict import Strict, invalid

HELD_OUT = "held_out_accuracy"


class Reward(Strict):
    """A reward model of a new head on the parent, by the Bradley-Terry loss (arXiv:2203.02155), pairs in file order."""

    max_num_steps: PositiveInt
    center_rewards_coefficient: NonNegativeFloat = Field(
        0.0, description="Weight of a pair's squared sum of rewards, for a mean of 0 (arXiv:2312.09244)."
    )


class RewardTraining(PreferenceTraining):
    """A reward model, which reads a conversation and gives its last token's state a score."""

    trainer = "scripts.backends.trl.reward_trainer"
    has_reference = False
    joined = True
    metrics = TrlTraining.metrics | {"accuracy": "accuracy", HELD_OUT: "validation_accuracy"}

    algorithm: Literal["reward"]
    reward: Reward

    @property
    def needs_export(self) -> str | None:
        """Say why the stage cannot start from a fresh model."""
        return "a reward model is a new head on a trained model"

    @model_validator(mode="after")
    def _trains_all_weights(self) -> "RewardTraining":
        if self.policy.lora is not None:
            raise invalid("policy.lora is not for reward models, whose new head it would not train; leave it out")
        return self


class RewardConfig(TrlConfig, RewardTraining):
    """The resolved config of a reward model."""


class RewardSettings(TrlSettings, RewardTraining):
    """A stage that trains a reward model."""

    config_model = RewardConfig
