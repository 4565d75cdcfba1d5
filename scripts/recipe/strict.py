"""The base of all typed models: unknown keys are refused with the nearest known key."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

NAME = r"^[a-z0-9][a-z0-9_.-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME)]

# What other tools call it.
ELSEWHERE = {
    **dict.fromkeys(["peft", "peft_config", "lora", "lora_config", "use_peft", "qlora"], "policy.lora of a stage"),
    **dict.fromkeys(["ppo", "reinforce", "rloo"], "grpo, whose baseline is the group's mean and which needs no critic"),
    **dict.fromkeys(["orpo", "kto", "simpo"], "dpo or mpo"),
    **dict.fromkeys(["learning_rate", "lr"], "policy.optimizer.lr"),
    **dict.fromkeys(["warmup_steps", "lr_warmup_steps", "warmup_ratio"], "policy.optimizer.lr_warmup_iters"),
    **dict.fromkeys(["num_train_epochs", "max_steps", "epochs"], "max_num_steps in the section of the algorithm"),
    **dict.fromkeys(["per_device_train_batch_size", "batch_size"], "policy.train_global_batch_size, in rows a step"),
    "gradient_accumulation_steps": "policy.train_micro_batch_size; the batch is policy.train_global_batch_size",
    **dict.fromkeys(["beta", "kl_coef"], "loss_fn.reference_policy_kl_penalty"),
    "num_generations": "grpo.num_generations_per_prompt",
    **dict.fromkeys(["max_completion_length", "max_response_length"], "policy.generation.max_new_tokens"),
    **dict.fromkeys(["max_seq_length", "max_length"], "policy.max_total_sequence_length"),
    **dict.fromkeys(["hugging_face", "huggingface", "hf"], "hub"),
    "save_steps": "checkpointing.save_period",
    **dict.fromkeys(["dataset", "datasets", "data_path"], "blends, and blend of a stage"),
    **dict.fromkeys(["model_name_or_path", "base_model"], "model.name of the recipe"),
    **dict.fromkeys(["reward_model", "reward_funcs"], "environments, which rows name (docs/environments.md)"),
    **dict.fromkeys(["tensorboard", "wandb", "trackio"], "report_to of the site"),
    **dict.fromkeys(["deepspeed", "fsdp", "fsdp_config"], "policy.dtensor_cfg"),
}


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the closest valid word, or the list of all without a close word."""
    words = sorted(words)
    if word.lower() in ELSEWHERE and word.lower() not in words:
        return f"; here that is {ELSEWHERE[word.lower()]}"
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(words)}"


def invalid(message: str, at: str | None = None) -> PydanticCustomError:
    """Return the error of a misfit; `at` is the key in the file, if not the validated key."""
    return PydanticCustomError("invalid", "{message}", {"message": message} | ({"at": at} if at else {}))


def misnamed(at: str, what: str, name: str, valid: Iterable[str]) -> PydanticCustomError:
    """Return the error of a key `at` with an unknown name."""
    return invalid(f"no {what} is named {name}{nearest(name, valid)}", at)


NUMBERS = (int, float, int | None, float | None)


class Strict(BaseModel):
    """Refuse unknown keys with the nearest known key, and keys in `gone` with their sentence.

    `gone` maps a key of an earlier version to a sentence: what to do instead. Subclasses inherit the entries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    gone: ClassVar[dict[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add the entries of the parent classes."""
        cls.gone = {key: text for base in reversed(cls.__mro__) for key, text in vars(base).get("gone", {}).items()}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    gone = cls.gone.get(str(key))
                    message = f"is gone: {gone}" if gone else f"unknown key{nearest(str(key), cls.model_fields)}"
                    raise PydanticCustomError("unknown_key", "{message}", {"key": str(key), "message": message})
                if isinstance(data[key], bool) and cls.model_fields[key].annotation in NUMBERS:
                    raise invalid(f"{key} is a number; YAML reads yes, no, on and off as true and false")
        return data
