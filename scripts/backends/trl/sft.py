"""Settings of supervised fine-tuning, and the tokens of demonstrations."""

from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from scripts.backends.trl.algorithm import Parts, TrlConfig, TrlSettings, TrlTraining
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

    def prepare(self, processor: Any) -> tuple[Any, partial]:
        """Tokenize demonstrations."""
        from scripts.backends.trl.tokenization import DEMONSTRATIONS, tokenize_demonstrations  # noqa: PLC0415

        return DEMONSTRATIONS, partial(
            tokenize_demonstrations,
            processor=processor,
            max_length=self.max_length,
            variables=self.policy.tokenizer.chat_template_kwargs,
            assistant_only_loss=self.sft.assistant_only_loss,
        )

    def parts(self, row: dict[str, Any], processor: Any) -> Parts:
        """Return the runs of learnt and unlearnt tokens."""
        from scripts.backends.tokens import runs  # noqa: PLC0415
        from scripts.backends.trl.tokenization import IGNORED  # noqa: PLC0415

        return list(runs(row["input_ids"], row["labels"], IGNORED))


class SftConfig(TrlConfig, SftTraining):
    """The resolved config of supervised fine-tuning."""


class SftSettings(TrlSettings, SftTraining):
    """A stage of supervised fine-tuning."""

    config_model = SftConfig
