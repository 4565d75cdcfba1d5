"""A tiny decoder and its byte-level tokenizer, with random weights: where a stage without a parent starts.

Where the recipe gives it vision, the decoder is LLaVA's language model, and its tokenizer part of a processor.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from scripts.recipe.model import RandomModel
from scripts.recipe.stage import TrainingConfig

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
IMAGE, TOOL, CALL, CALL_END = "<|image|>", "<|tool|>", "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = (
    "{% macro said(content) %}"
    "{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% endmacro %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ said(message['content']) + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ said(message['content']) + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOLS_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% generation %}{{ said(message['content']) + '<|end|>' }}{% endgeneration %}",
    "{% generation %}{{ said(message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] + call['function']['arguments'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endgeneration %}",
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": CALL + r"(?P<name>\w+)",
            "close": CALL_END,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END},
    },
}


def make_tokenizer(sees: bool = False, calls_tools: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte (BPE without merges) and its specials; it pads on the left.

    The chat template prints no tool declarations: the tiny model knows its few tools by heart. transformers reads the
    calls of a model that `calls_tools` by the response template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, *[IMAGE] * sees, *[TOOL] * calls_tools],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    if calls_tools:
        fast.add_tokens([CALL, CALL_END])
        fast.chat_template, fast.response_template = TOOLS_TEMPLATE, RESPONSE_TEMPLATE
    return fast


def fresh_model(config: TrainingConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerFast | LlavaProcessor]:
    """The model that a stage's resolved config describes, and its tokenizer or processor."""
    processor = make_processor(config.model)
    return make_model(config.model, processor, config.max_length, config.seed), processor


def make_processor(shape: RandomModel) -> PreTrainedTokenizerFast | LlavaProcessor:
    """What turns rows into the model's inputs: a tokenizer, or a processor where the model has vision.

    Pictures are scaled by Pillow, so torchvision is not needed.
    """
    vision = shape.vision
    if vision is None:
        return make_tokenizer(calls_tools=shape.tools)
    size = {"height": vision.image_size, "width": vision.image_size}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=make_tokenizer(sees=True),
        patch_size=vision.patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    shape: RandomModel, processor: PreTrainedTokenizerFast | LlavaProcessor, max_length: int, seed: int
) -> PreTrainedModel:
    """A Llama-shaped decoder in float32 with tied embeddings; equal arguments give equal weights."""
    tokenizer, vision = getattr(processor, "tokenizer", processor), shape.vision
    decoder = _decoder_config(shape, tokenizer, max_length)
    torch.manual_seed(seed)
    if vision is None:
        model = LlamaForCausalLM(decoder)
    else:
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                text_config=decoder,
                vision_config=SiglipVisionConfig(**vision.model_dump(), vision_use_head=False),
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


def _decoder_config(shape: RandomModel, tokenizer: PreTrainedTokenizerFast, max_length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        initializer_range=shape.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
