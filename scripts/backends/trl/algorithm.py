"""The common part of the algorithms: a policy's settings, and `TrlSettings`, of which each algorithm is a subclass."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic.json_schema import SkipJsonSchema

from scripts.errors import UserError
from scripts.recipe.effect import Fact, Later, WithoutEffect
from scripts.recipe.model import RandomModel
from scripts.recipe.sampling import OWN, Tokenizer
from scripts.recipe.source import Share
from scripts.recipe.stage_settings import BY_OTHER_SHAPE, PLACE_IN_ROWS, ROWS_LEFT_OUT, StageSettings, Surroundings
from scripts.recipe.strict import Strict, invalid
from scripts.recipe.yaml_file import pinned_versions
from scripts.rows.chat_format import read_template

PACKAGES = ("trl", "transformers", "torch", "accelerate")
LARGEST_RATE = 0.1


class Optimizer(Strict):
    """AdamW; the rate rises linearly over the warm-up steps, then follows the schedule."""

    lr: PositiveFloat
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up; cosine and linear end at 0."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_init: Later[NonNegativeFloat | None] = None
    """The first step's rate in a warm-up; none: lr / lr_warmup_iters, and 0 as it was before."""
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    clip_grad: PositiveFloat = 1.0
    name: Later[Literal["adamw_torch", "adamw_torch_fused"]] = "adamw_torch_fused"


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685), by peft, merged at export."""

    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="The adapters' sum is weighed by alpha / dim.")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] = Field([], description="Names of the linear layers; none: all but the output layer.")
    exclude_modules: list[str] = Field([])
    target_parameters: list[str] = Field([])
    """Names of parameters outside linear layers, as mlp.experts.down_proj of fused experts."""
    from_parent: SkipJsonSchema[bool] = False  # stays: the identity of every stage with adapters contains it
    quantization: Literal["nf4"] | None = Field(
        None,
        description="Hold the frozen weights in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes (not tried on a GPU, "
        "but on a CPU).",
    )

    @field_validator("from_parent")
    @classmethod
    def _is_gone(cls, value: bool) -> bool:
        if value:
            raise invalid("is gone: an export has its adapters merged; leave the key out, and train new ones over it")
        return value


class Dtensor(Strict):
    """The model's layout over the training processes. May change no weight but for rounding."""

    gone: ClassVar = {
        "cpu_offload": "leave it out; adapters (policy.lora) or more processes need less of a GPU's memory",
        "reshard_after_forward": "leave it out; gathered weights are never kept for the backward pass",
    }

    enabled: bool = False
    """FSDP2: every process holds a share of weights, gradients and moments; false: a copy of all."""
    activation_checkpointing: bool = Field(False, description="Compute activations again instead of keeping all.")


class Policy(Strict):
    """Settings of every algorithm's policy."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_micro_batch_size: WithoutEffect[PositiveInt | None] = None
    """Rows of a process at once; none: the process's whole share of a batch."""
    precision: Later[Literal["float32", "bfloat16"]] = "float32"
    """Of the computation; trained weights stay in float32."""
    attn_implementation: Later[Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None] = None
    """None: transformers' choice for the model; flash_attention needs a GPU (not tried on a GPU)."""
    dtensor_cfg: WithoutEffect[Dtensor] = Dtensor()
    lora: Later[Lora | None] = Field(None, description="None: all weights are trained.")
    tokenizer: Later[Tokenizer] = Tokenizer()
    skip_padding: Later[bool] = False
    """Compute nothing for padding, ended responses and tokens without loss: the same losses but for rounding."""
    optimizer: Optimizer


class TrainingData(Strict):
    """How a stage takes the rows of its training split."""

    shuffle: Later[bool] = False
    """Take the rows of every epoch in an order of its own, drawn from the stage's seed; false: in file order."""


class TrlSettings(StageSettings):
    """Settings and derived numbers of every algorithm."""

    READS = ("template_date",)
    takes_model = True

    data: Later[TrainingData] = TrainingData()
    policy: Policy
    model: Fact[RandomModel | None] = None

    metrics: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "learning_rate": "lr",
        "entropy": "entropy",
    }
    """Columns of metrics.parquet (scripts.stage.tables), by the names that TRL logs."""
    samples_by_vllm: ClassVar[bool] = False
    """Whether vLLM samples the rollouts, with the packages of envs/vllm.txt."""
    updates_per_step: ClassVar[int] = 1
    """Optimizer updates in a step."""
    sequences_per_row: ClassVar[int] = 1
    """Token sequences of a row: 2 of a preference pair."""
    has_reference: ClassVar[bool] = False
    """Whether the loss compares the policy with the stage's start."""
    least_rows: ClassVar[int] = 1
    """Rows that the loss needs at once."""
    amending: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("sft", "grpo", "distillation", "dpo", "mpo", "kto", "reward", "loss_fn", "gym"), ""),
        **dict.fromkeys(("policy.precision", "policy.attn_implementation", "policy.skip_padding"), ""),
        "policy.generation": "",
        "policy.generation.max_new_tokens": ROWS_LEFT_OUT,
        "policy.optimizer": "",
        "policy.optimizer.name": "the checkpoint holds the state of the other optimizer",
        "policy.lora": BY_OTHER_SHAPE,
        "policy.tokenizer": "the rows would be other tokens",
        "policy.max_total_sequence_length": ROWS_LEFT_OUT,
        "policy.truncation_mode": "the rows would be other tokens",
        "policy.train_global_batch_size": PLACE_IN_ROWS,
        **dict.fromkeys(("grpo.num_prompts_per_step", "distillation.num_prompts_per_step"), PLACE_IN_ROWS),
        "grpo.num_generations_per_prompt": PLACE_IN_ROWS,
        "sft.assistant_only_loss": "the rows would be other tokens",
        "data": "the rows would come in another order, so the checkpoint's place in them would be another",
        "stop_when": "what was measured so far was judged by the other rule",
    }

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split in a step."""
        return self.policy.train_global_batch_size

    @property
    def chat_template(self) -> str | None:
        """The stage's chat template, in a resolved config its text; None: the start's template."""
        named = self.policy.tokenizer.chat_template
        return None if named == OWN else named

    @property
    def max_length(self) -> int:
        """Tokens of prompt and response together, at most."""
        return self.policy.max_total_sequence_length

    @property
    def rows_per_update(self) -> int:
        """Rows, pairs or completions in an update."""
        return self.rows_per_step

    @property
    def needs_export(self) -> str | None:
        """The reason why a fresh model cannot be the start; None: a fresh model can."""
        return "policy.lora is laid over a model that was trained" if self.policy.lora else None

    @property
    def shared_by_processes(self) -> dict[str, int | None]:
        """Settings, by key, that the number of processes must divide."""
        return {"policy.train_global_batch_size": self.policy.train_global_batch_size}

    def frozen_bytes(self, of_roles: list[int], own: int, width: int, on_gpu: bool) -> dict[str, float]:
        """Return the bytes of frozen models in a process's memory, by purpose: of a reward model.

        `of_roles`: the parameters of the other models that are at hand; `own`: those of the trained model; `width`: the
        bytes of a number in the computation.
        """
        return {"reward model": width * sum(of_roles)}

    def planned_step(self, train_rows: int | None) -> int:
        """The last step of the stage, whatever the rows."""
        return self.section.max_num_steps

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return the versions pinned in envs/trl.txt."""
        return pinned_versions("trl", self.packages)

    @property
    def kept_by_continuing(self) -> dict[str, Any]:
        """Return the settings of the optimizer and of the steps' updates."""
        more = {"policy.optimizer.name": self.policy.optimizer.name, "updates of a step": self.updates_per_step}
        return super().kept_by_continuing | more

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages with an effect on weights."""
        lora = self.policy.lora
        return (*PACKAGES, *(["peft"] if lora else []), *(["bitsandbytes"] if lora and lora.quantization else []))

    def values_with_effect(self) -> dict[str, Any]:
        """Return the settings that may change weights; later additions only where they are not off."""
        values = super().values_with_effect()
        if self.chat_template is not None:
            values["policy"]["tokenizer"]["chat_template"] = read_template(self.chat_template)
        optimizer, settings = values["policy"]["optimizer"], self.policy.optimizer
        first = optimizer.pop("lr_warmup_init", settings.lr / max(1, settings.lr_warmup_iters))
        if settings.lr_warmup_iters and first:  # a config without the key, as of earlier versions, starts at 0
            optimizer["lr_warmup_init"] = first
        if self.stopping is not None:  # what is measured decides where the stage ends, and so its weights
            when = {name: getattr(self.section, name) for name in ("val_period", "val_batches")}
            values["stop_when"] |= when
        return values

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are taken in a random order."""
        return self.data.shuffle

    def draws_by_seed(self, is_fresh: bool, parent: StageSettings | None = None) -> bool:
        """Whether rows are shuffled, or weights drawn: of a fresh model, or of new adapters."""
        return self.data.shuffle or self.policy.lora is not None or is_fresh

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where the recipe's model or blend does not fit the backend."""
        if self.needs_export and around.is_fresh:
            advice = "give it a parent, or make the recipe's model a pretrained one"
            raise invalid(f"{self.needs_export}; {advice}", around.at)
        for before in around.continued:
            if self.policy.lora or before.policy.lora:
                raise invalid("exports have adapters merged, so none continue; say parent", f"{around.at}.continues")
        around.blend.refuse_images("only NeMo-RL trains on images", f"{around.at}.blend")

    def completed(self, release: str | None, name: str, key: Callable[..., str]) -> Self:
        """Return the stage; UserError where its chat template is missing."""
        if self.chat_template is not None:
            try:
                read_template(self.chat_template)
            except UserError as error:
                at = key("stages", name, "policy", "tokenizer", "chat_template")
                raise UserError(f"{at}: {error}") from None
        return self

    @property
    def unlikely_values(self) -> list[str]:
        """Return what is likely a mistake in the optimizer's settings."""
        optimizer, steps = self.policy.optimizer, self.planned_step(None)
        found = []
        if optimizer.lr > LARGEST_RATE:
            moves = "AdamW moves a weight by about that in a step, so few steps end a model"
            found.append(f"policy.optimizer.lr is {optimizer.lr:g}; {moves}")
        if optimizer.lr_warmup_iters >= steps:
            never = "so the rate never reaches lr"
            found.append(f"policy.optimizer.lr_warmup_iters is {optimizer.lr_warmup_iters} of {steps} steps, {never}")
        return found
