"""A tiny decoder with random weights, the start of a stage without a parent; LLaVA's with vision."""

from typing import Any

import torch
import transformers

from scripts.model.processor import make_processor, use_template
from scripts.model.scratch import IMAGE
from scripts.recipe.model import RandomModel
from scripts.recipe.stage_settings import TrainingConfig
from scripts.rows.chat_format import tokenizer_of


def fresh_model(config: TrainingConfig) -> tuple[transformers.PreTrainedModel, Any]:
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
