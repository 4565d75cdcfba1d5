"""What the trainers of every algorithm of backend `trl` start from: arguments, model, processor, rows."""

from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, BitsAndBytesConfig
from trl.trainer.utils import create_model_from_path

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithms import Dtensor
from scripts.data.prompts import Messages, pictures_of
from scripts.data.rows import read_rows
from scripts.errors import UserError
from scripts.model.load import class_of, load_processor, tokenizer_of
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
        "optim": "adamw_bnb_8bit" if optimizer.name == "adamw_8bit" else optimizer.name,
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
        **(_sharding(placing) if placing.enabled else {}),
    }


def _sharding(placing: Dtensor) -> dict[str, Any]:
    """Trainer's options of FSDP2; checkpoints hold whole weights, so any number of processes may go on from them."""
    config = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_offload": placing.cpu_offload}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


def shares_of(job: TrainingJob) -> tuple[int, int]:
    """Rows that a process takes at once, and how often for one update; UserError where no even shares are."""
    settings = job.settings.policy
    share = job.config.rows_per_update // job.ranks
    micro = min(settings.train_micro_batch_size or share, share)
    if share % micro:
        raise UserError(
            f"{job.stage}: policy.train_micro_batch_size is {micro}, but {share} rows of an update fall to each of "
            f"{job.ranks} processes, which is no multiple of it"
        )
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
    """peft's config of the adapters to make; None where all weights are trained, or the parent's adapters.

    UserError where they would lie over nothing, or over what TRL does not take.
    """
    lora = job.config.policy.lora
    if lora is None or lora.from_parent:
        return None
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where adapters are trained
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    config = LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or ([] if lora.target_parameters else "all-linear"),
        target_parameters=lora.target_parameters or None,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        shape = class_of(job.parent_model).from_config(AutoConfig.from_pretrained(job.parent_model))
    try:
        adapted = get_peft_model(shape, deepcopy(config))
    except ValueError as error:
        raise UserError(f"{job.stage}: policy.lora: {error}") from None
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        raise UserError(f"{job.stage}: policy.lora.target_modules: TRL lays no adapters over lm_head; leave it out")
    frozen = [name for name, weights in shape.named_parameters() if weights.ndim > 2 and "_layer." not in name]
    if frozen and not lora.target_modules:
        print(f"{job.stage}: {frozen[0]} and its like get no adapters (policy.lora.target_parameters)", flush=True)
    return config


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
