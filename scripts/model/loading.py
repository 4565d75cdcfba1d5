"""A policy or reward model in Hugging Face format: read from a folder, or made with random weights."""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open

from scripts.errors import UserError
from scripts.files import check_readable
from scripts.model.hugging_face import config_of, has_reward_head, model_files
from scripts.model.processor import make_processor, use_template
from scripts.model.scratch import IMAGE
from scripts.recipe.model import RandomModel
from scripts.recipe.stage_settings import StageSettings
from scripts.rows.chat_format import tokenizer_of


def load_model(
    folder: Path, dtype: torch.dtype | str = torch.float32, device_map: Literal["auto"] | None = None
) -> transformers.PreTrainedModel:
    """Load the model in float32, or with `auto` in the saved type; on the CPU, or over this node's GPUs."""
    check_readable(folder)
    return class_of(folder).from_pretrained(folder, local_files_only=True, dtype=dtype, device_map=device_map)


def fill_model(model: transformers.PreTrainedModel, like: Path, folder: Path) -> bool:
    """Replace the weights of a model from `like` by a folder's, a tensor at a time; return whether they fit.

    Where they do not fit, the model stays as it is. Tensors are replaced, not overwritten, since autograd's graph may
    hold one.
    """
    check_readable(folder)
    own, shards = model.state_dict(), shards_of(folder)
    filled = {own[name].data_ptr() for name in shards if name in own}
    is_whole = all(tensor.data_ptr() in filled for tensor in own.values())
    if config_of(folder) != config_of(like) or shards.keys() - own.keys() or not is_whole:
        return False
    types = {name: (own[name].device, own[name].dtype) for name in shards}
    del own  # or the tensors would outlive their replacement
    for name, shard in shards.items():
        model.load_state_dict({name: read_tensor(shard, name).to(*types[name])}, strict=False, assign=True)
    model.tie_weights()
    return True


def shards_of(folder: Path) -> dict[str, Path]:
    """Return the file of each of a model's tensors."""
    places = {}
    for path in model_files(folder):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as shard:
                places |= dict.fromkeys(shard.keys(), path)
    return places


def read_tensor(shard: Path, name: str) -> torch.Tensor:
    """Read a tensor, and close the file, whose pages in memory would count as this process's."""
    with safe_open(shard, "pt") as file:
        return file.get_tensor(name)


def count_gpus(accelerator: str) -> int:
    """Count this node's GPUs for a site's accelerator: none for `cpu`; UserError for `cuda` without any."""
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and not gpus:
        raise UserError(f"the site's accelerator is cuda, but torch {torch.__version__} sees no GPU here")
    return gpus


def class_of(folder: Path) -> type:
    """Return the class that loads the model: a reward model, or a policy with or without vision."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if has_reward_head(config.to_dict()):
        return transformers.AutoModelForSequenceClassification
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def fresh_model(config: StageSettings) -> tuple[transformers.PreTrainedModel, Any]:
    """Make the model of a stage's resolved config, and its tokenizer or processor."""
    processor = use_template(make_processor(config.model), config.chat_template)
    return make_model(config.model, processor, config.max_length, config.seed), processor


def make_model(shape: RandomModel, processor: Any, max_length: int, seed: int) -> transformers.PreTrainedModel:
    """Make a Llama-shaped decoder in float32 with tied embeddings; equal arguments give equal weights."""
    tokenizer, vision = tokenizer_of(processor), shape.vision
    decoder = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        **shape.model_dump(exclude={"rope_theta", "vision", "tools"}),
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    if vision is None:
        model = transformers.LlamaForCausalLM(decoder)
    else:
        model = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                text_config=decoder,
                vision_config=transformers.SiglipVisionConfig(**vision.model_dump(), vision_use_head=False),
                image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
                image_seq_length=(vision.image_size // vision.patch_size) ** 2,
                vision_feature_select_strategy="full",
                vision_feature_layer=-1,
                tie_word_embeddings=True,
                dtype="float32",
            )
        )
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model
