"""Settings of supervised fine-tuning."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from scripts.backends.trl.algorithm import TrlConfig, TrlSettings, TrlTraining
from scripts.backends.trl.policy import Policy
from scripts.recipe.strict import Strict


class SftPolicy(Policy):
    """The policy of a supervised stage."""

    gone: ClassVar = {"sequence_packing": "leave it out; train_micro_batch_size: 1 pads nothing"}

    train_global_batch_size: PositiveInt = Field(description="Rows a step.")


class Sft(Strict):
    """Supervised fine-tuning on the assistant's tokens, rows in file order."""

    ADDED = ("assistant_only_loss",)

    max_num_steps: PositiveInt
    assistant_only_loss: bool = Field(
        False,
        description="Learn every message of the assistant; false: the last alone. Needs {% generation %} in the "
        "chat template, or rows whose tokens prove every message's begin and end.",
    )


class SftTraining(TrlTraining):
    """Supervised fine-tuning."""

    trainer = "scripts.backends.trl.sft_trainer"

    algorithm: Literal["sft"]
    sft: Sft
    policy: SftPolicy


class SftConfig(TrlConfig, SftTraining):
    """The resolved config of supervised fine-tuning."""


class SftSettings(TrlSettings, SftTraining):
    """A stage of supervised fine-tuning."""

    config_model = SftConfig
