"""What the trainers of every algorithm of backend `trl` start from: arguments, model, processor."""

from typing import Any

from transformers import BitsAndBytesConfig, TrainingArguments
from trl.trainer.utils import create_model_from_path

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.sharding import is_sharded, sharding_arguments
from scripts.model.load import load_processor
from scripts.model.random_init import fresh_model

# Transformers below 5.20, which vLLM wants, knows the older name alone.
_NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in _NAMES if name in TrainingArguments.__dataclass_fields__)


def shared_arguments(job: TrainingJob) -> dict[str, Any]:
    """Training arguments that all trainers share. TRL counts updates where a stage counts steps."""
    config, placing = job.config, job.settings.policy.dtensor_cfg
    policy, updates = config.policy, config.updates_per_step
    optimizer = policy.optimizer
    micro, accumulated = shares_of(job)
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "optim": "adamw_bnb_8bit" if optimizer.name == "adamw_8bit" else optimizer.name,
        "output_dir": str(job.run / "saving"),
        "max_steps": job.max_num_steps * updates,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
        "warmup_steps": optimizer.lr_warmup_iters * updates,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "max_grad_norm": optimizer.clip_grad,
        "seed": config.seed,
        "data_seed": config.seed,
        "gradient_checkpointing": False,
        CHECKPOINTING: placing.activation_checkpointing,
        "bf16": policy.precision == "bfloat16",
        "use_cpu": job.accelerator == "cpu",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": job.accelerator != "cpu",
        "save_strategy": "steps",
        "save_steps": job.settings.checkpointing.save_period * updates,
        "logging_strategy": "steps",
        "logging_steps": updates,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",
        # Also keeps DDP from regrouping gradients after the first step, which would round a resumed step otherwise.
        "ddp_find_unused_parameters": not placing.activation_checkpointing,
        **(sharding_arguments(job) if is_sharded(job) else {}),
    }


def shares_of(job: TrainingJob) -> tuple[int, int]:
    """Rows that a process takes at once, and how often for one update."""
    share = job.config.rows_per_update // job.ranks
    micro = min(job.settings.policy.train_micro_batch_size or share, share)
    return micro, share // micro


def start_options(job: TrainingJob) -> dict[str, Any] | None:
    """What TRL loads the parent's model with; None where `model_and_processor` has given it the model itself."""
    return None if job.parent_model is None or job.parent_adapter else _loading(job)


def _loading(job: TrainingJob) -> dict[str, Any]:
    """What a model is loaded with: in the precision that what is not trained is computed in."""
    policy = job.config.policy
    frozen = policy.lora is not None and policy.precision == "bfloat16"
    options: dict[str, Any] = {"dtype": "bfloat16" if frozen else "float32"}
    if policy.attn_implementation is not None:
        options["attn_implementation"] = policy.attn_implementation
    if policy.lora is not None and policy.lora.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
        )
    return options


def adapters(job: TrainingJob) -> Any:
    """peft's config of the adapters to make; None where all weights are trained, or the parent's adapters."""
    lora = job.config.policy.lora
    if lora is None or lora.from_parent:
        return None
    from peft import LoraConfig  # noqa: PLC0415 - only where adapters are trained

    return LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or ([] if lora.target_parameters else "all-linear"),
        target_parameters=lora.target_parameters or None,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
    )


def model_and_processor(job: TrainingJob) -> tuple[Any, Any]:
    """The model to start from (a path, a fresh one, or one with its parent's adapters) and its tokenizer or processor.

    Of adapters that it is given TRL keeps a copy as the reference, so that is the parent and not what they lie over.
    """
    if job.parent_model is None:
        return fresh_model(job.config)
    model: Any = str(job.parent_model)
    if job.parent_adapter is not None:
        from peft import PeftModel  # noqa: PLC0415 - only where adapters are trained

        base = create_model_from_path(model, device_map=None, **_loading(job))
        model = PeftModel.from_pretrained(base, str(job.parent_adapter), is_trainable=True)
    return model, load_processor(job.parent_model)
