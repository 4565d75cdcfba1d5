"""What the trainers of every algorithm of backend `trl` start from: arguments, model, processor, rows."""

from itertools import islice
from typing import Any

from PIL import Image
from transformers import BitsAndBytesConfig

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.sharding import is_sharded, sharding_arguments
from scripts.data.prompts import Messages, pictures_of
from scripts.data.rows import read_rows
from scripts.errors import UserError
from scripts.model.load import load_processor, tokenizer_of
from scripts.model.random_init import fresh_model


def shared_arguments(job: TrainingJob) -> dict[str, Any]:
    """Training arguments that all trainers share. TRL counts updates where a stage counts steps."""
    config, placing = job.config, job.settings.policy.dtensor_cfg
    policy, updates = config.policy, config.updates_per_step
    optimizer = policy.optimizer
    micro, accumulated = shares_of(job)
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "optim": optimizer.name,
        "output_dir": str(job.run / "saving"),
        "max_steps": job.max_num_steps * updates,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.schedule if optimizer.schedule == "cosine" else "constant_with_warmup",
        "warmup_steps": optimizer.lr_warmup_iters * updates,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "max_grad_norm": optimizer.clip_grad,
        "seed": config.seed,
        "data_seed": config.seed,
        "gradient_checkpointing": False,  # activation_checkpointing in newer transformers, which know both
        "activation_checkpointing": placing.activation_checkpointing,
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


def start_options(job: TrainingJob) -> dict[str, Any]:
    """What the parent's model is loaded with: in the precision that what is not trained is computed in."""
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
    """peft's config of the adapters that are trained; None where all weights are."""
    lora = job.config.policy.lora
    if lora is None:
        return None
    from peft import LoraConfig  # noqa: PLC0415 - only where adapters are trained

    return LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or "all-linear",
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
    )


def model_and_processor(job: TrainingJob) -> tuple[Any, Any]:
    """The model to start from (a path, or for a stage without a parent a fresh one) and its tokenizer or processor."""
    if job.parent_model is None:
        return fresh_model(job.config)
    return str(job.parent_model), load_processor(job.parent_model)


def pictures_by_row(job: TrainingJob, conversations: list[Messages], processor: Any) -> list[list[str]]:
    """The pictures that each row of the training split shows; UserError for the first one that the model cannot see."""
    pictures = [pictures_of(messages) for messages in conversations]
    if tokenizer_of(processor) is processor and any(pictures):
        number = next(number for number, uris in enumerate(pictures, start=1) if uris)
        raise UserError(f"{job.train_split}:{number}: shows a picture, but the recipe's model has no vision")
    return pictures


def expand_pictures(texts: list[str], processor: Any) -> list[str]:
    """The texts with as many tokens in a picture's place as it has for the model; all are scaled to one size."""
    token = getattr(processor, "image_token", None)
    if token is None:
        return texts
    expanded = processor(text=[token], images=[Image.new("RGB", (1, 1))])["input_ids"][0]
    return [text.replace(token, token * len(expanded)) for text in texts]


def training_rows(job: TrainingJob, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of the training split in file order; the whole split when it has fewer."""
    return [row for _, _, row in islice(read_rows(job.train_split), count)]
