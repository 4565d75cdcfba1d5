"""Settings of a NeMo-RL stage with effect on weights, and the resolved config made of them."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from scripts.recipe.sampling import OWN
from scripts.recipe.stage_settings import Training, TrainingConfig
from scripts.recipe.strict import Strict, invalid

PREFETCHED_STEPS = 2
READS = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}
"""Defaults of ``data`` in NeMo-RL's sft.yaml: how SFT tokenizes a conversation."""
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""NeMo-RL's template for ``chat_template: null``."""


class NemoRlTraining(Training):
    """A config of NeMo-RL's and the recipe's settings over the config, in NeMo-RL's keys.

    ``sft``, ``grpo``, ``dpo``, ``mpo``, ``loss_fn``, ``policy``, ``data``, ``env`` and ``logger`` reach the driver
    unchanged.
    """

    backend: Literal["nemo_rl"]
    algorithm: Literal["sft", "grpo", "dpo", "mpo"]
    reward: Literal["verifier", "judge", "pairs"] | None = None
    """Where the reward comes from; none, and only there: SFT."""
    config: str = Field(description="The config's path in NeMo-RL's checkout.")
    entry: str = Field("examples/nemo_gym/run_grpo_nemo_gym.py", description="The driver's path in the checkout.")
    max_num_steps: PositiveInt | None = None
    """The planned step; none: as many as the training rows are enough for."""
    sft: dict[str, Any] = Field({})
    grpo: dict[str, Any] = Field({})
    dpo: dict[str, Any] = Field({})
    mpo: dict[str, Any] = Field({})
    loss_fn: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    data: dict[str, Any] = Field({})
    env: dict[str, Any] = Field({})
    add: dict[str, Any] = Field({}, description="Settings like those above that the release's config does not have.")
    sandbox: bool = Field(False, description="A sandbox container beside every node's, for code and Lean.")
    sif: bool = Field(False, description="The rows run in containers of their own (site's nemo_rl.sif).")
    environment: dict[str, str] = Field({}, description="Variables of the driver. No secrets.")
    overrides: list[str] = Field([], description="Further Hydra overrides; they come last and win.")

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Return the recipe's ``policy.tokenizer``."""
        added = self.add.get("policy", {}).get("tokenizer", {})
        return {**(self.policy.get("tokenizer") or {}), **(added or {})}

    @property
    def chat_template(self) -> str | None:
        """Return the recipe's chat template: a path (.jinja) or the text; None for the tokenizer's."""
        named = self.tokenizer.get("chat_template", OWN)
        if named is None:
            return PASSTHROUGH
        return None if named.lower() == OWN else named

    @property
    def reads(self) -> dict[str, bool]:
        """Return SFT's options of beginnings and ends: the recipe's ``data`` over `READS`."""
        return {name: self.data.get(name, value) for name, value in READS.items()}

    @property
    def rows_per_step(self) -> int:
        """Return the training rows of one step."""
        if self.algorithm == "grpo":
            return self.grpo["num_prompts_per_step"]
        return self.policy["train_global_batch_size"]

    @property
    def max_length(self) -> int:
        """Return the most tokens of prompt and response together."""
        return self.policy["max_total_sequence_length"]

    @property
    def longest_row(self) -> int:
        """Return the most tokens of a row; SFT masks a row of full length."""
        return self.max_length - (self.algorithm == "sft")

    @property
    def samples_per_step(self) -> int:
        """Return the training rows of one step, or the completions sampled for the rows."""
        return self.rows_per_step * (self.grpo["num_generations_per_prompt"] if self.algorithm == "grpo" else 1)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether rollouts are generated during training, in one pass over the data."""
        return bool(self.grpo.get("async_grpo", {}).get("enabled", False))

    def planned_step(self, train_rows: int | None) -> int | None:
        """Return the step at which the stage is done; None where the rows are unknown.

        By default ``max_num_epochs`` passes over the training rows, without partial batches. Asynchronous training
        generates ahead and waits for ever at the end of the data, so the planned step lies two steps before the end;
        a resumed training may end earlier (scripts.stage.progress).
        """
        if self.max_num_steps is not None or train_rows is None:
            return self.max_num_steps
        batches = train_rows // self.rows_per_step
        if self.is_asynchronous:
            return max(0, batches - PREFETCHED_STEPS)
        return batches * self.section.get("max_num_epochs", 1)

    @model_validator(mode="after")
    def _fits_its_algorithm(self) -> "NemoRlTraining":
        if self.reward is None and self.algorithm != "sft":
            raise invalid(f"reward is missing, which says where that of {self.algorithm} comes from")
        fitting = {None: ("sft",), "pairs": ("dpo", "mpo"), "verifier": ("grpo",), "judge": ("grpo",)}[self.reward]
        if self.algorithm not in fitting:
            raise invalid(
                f"{self.algorithm} does not fit a reward from {self.reward}: static preference pairs are for dpo or "
                "mpo; a deterministic check (verifier) or a judge is for grpo; sft has none"
            )
        if self.algorithm == "sft" and not self.entry.endswith(("/run_sft.py", "/run_vlm_sft.py")):
            raise invalid("entry must be examples/run_sft.py, or examples/run_vlm_sft.py for pictures, to train sft")
        needed = [("policy", "train_global_batch_size"), ("policy", "max_total_sequence_length")]
        if self.algorithm == "grpo":
            needed += [("grpo", "num_prompts_per_step"), ("grpo", "num_generations_per_prompt")]
        for section, key in needed:
            if not isinstance(value := getattr(self, section).get(key), int) or value <= 0:
                raise invalid(f"{section}.{key} must be stated" + f", above 0, not {value}" * (value is not None))
        try:
            _, loss = (self.chat_template, self.is_asynchronous), self.loss_fn | self.add.get("loss_fn", {})
        except (AttributeError, TypeError):
            raise invalid("add, policy.tokenizer and grpo.async_grpo hold settings, chat_template a text") from None
        if self.algorithm != "grpo":
            return self
        product = self.samples_per_step
        batch = self.policy["train_global_batch_size"]
        if loss.get("force_on_policy_ratio") and batch != product:
            raise invalid(
                f"loss_fn.force_on_policy_ratio wants policy.train_global_batch_size ({batch}) to be "
                f"grpo.num_prompts_per_step x num_generations_per_prompt = {product}"
            )
        if product % batch:
            raise invalid(
                f"grpo.num_prompts_per_step x num_generations_per_prompt = {product} is no multiple of "
                f"policy.train_global_batch_size, {batch}"
            )
        return self


class FirstModel(Strict):
    """The model of a stage without a parent."""

    name: str
    revision: str | None = None


class NemoRlConfig(TrainingConfig, NemoRlTraining):
    """The resolved config of a stage, with `model` where there is no parent.

    `mtp`, a setting of earlier recipes, stays in identities.
    """

    model: FirstModel | None = None
    mtp: bool = False
