"""Make and load the tokenizer of a model, or the processor of a model with vision, without torch."""

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from scripts.errors import UserError
from scripts.model import scratch
from scripts.recipe.model import RandomModel
from scripts.recipe.sampling import TemplateVariables
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import PinnedClock, tokenizer_of
from scripts.rows.thoughts import begins_thoughts

ANSWER = "stagecoach"
LONGEST_TALK = 1 << 20
TALK = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": ANSWER},
]
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": scratch.ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": scratch.CALL + r"(?P<name>\w+)",
            "close": scratch.CALL_END,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": scratch.END},
    },
}


def pin_clock() -> None:
    """Let transformers print the pinned day in chat templates, for whoever renders in this process, as TRL does."""
    chat_template_utils.datetime = PinnedClock


def load_processor(folder: Path) -> Any:
    """Load the tokenizer, or the processor of a model with vision; its chat template prints the pinned day."""
    pin_clock()
    sees = (folder / "processor_config.json").exists()
    kind = transformers.AutoProcessor if sees else transformers.AutoTokenizer  # each takes long to import
    return kind.from_pretrained(folder, local_files_only=True)


def use_template(processor: Any, chat_template: str | None) -> Any:
    """Set the chat template of a processor or tokenizer; None: keep the saved template."""
    pin_clock()
    if chat_template is not None:
        processor.chat_template = tokenizer_of(processor).chat_template = chat_template
    return processor


def check_template(
    name: str,
    tokenizer: Any,
    key: str,
    ends: list[int],
    advice: str,
    variables: TemplateVariables | None = None,
) -> None:
    """Raise UserError where the chat template hides an answer to a prompt, or no generation ends as the answer does.

    `key` is the key of another template; generation ends with `ends` and eos, and `advice` is how to mend them.
    `variables` are those of the template. A prompt may begin thoughts: whether a stage's rows have them is asked there.
    """
    variables = variables or {}
    try:
        with bounded(f"{name}: the chat template (named by {key}, or the model's own)"):
            prompt = tokenizer.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True, **variables)
            text = tokenizer.apply_chat_template(TALK, tokenize=False, **variables)
            if len(prompt + text) > LONGEST_TALK:
                raise ValueError(f"more than {LONGEST_TALK} characters for four words")
    except UserError:
        raise
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(f"{name}: the chat template fails ({error}); name a template as {key}") from None
    if ANSWER not in text.removeprefix(prompt):
        raise UserError(f"{name}: the chat template prints no assistant's answer; name another template as {key}")
    if not text.startswith(prompt) and not begins_thoughts(prompt, text):
        raise UserError(
            f"{name}: the chat template begins a conversation differently from the prompt of the last answer, so "
            f"training and generation would differ; name another template as {key}"
        )
    after = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    known = {tokenizer.eos_token_id, *ends}
    if not after or after[0] not in known:
        closing = tokenizer.convert_ids_to_tokens(after[0]) if after else "nothing"
        raise UserError(
            f"{name}: the chat template ends an answer with {closing!r}, but generation ends with "
            f"{tokenizer.convert_ids_to_tokens(sorted(known))}; {advice}"
        )


def make_tokenizer(sees: bool = False, calls_tools: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte (BPE without merges) and specials, padding on the left.

    The chat template prints no tool declarations: the tiny model knows its few tools by heart. With `calls_tools`,
    transformers reads the model's calls by the response template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [scratch.USER, scratch.ASSISTANT, scratch.SYSTEM, *[scratch.IMAGE] * sees, *[scratch.TOOL] * calls_tools]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=scratch.PAD,
        eos_token=scratch.END,
        additional_special_tokens=special,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = scratch.CHAT_TEMPLATE
    if calls_tools:
        fast.add_tokens([scratch.CALL, scratch.CALL_END])
        fast.chat_template, fast.response_template = scratch.TOOLS_TEMPLATE, RESPONSE_TEMPLATE
    return fast


def make_processor(shape: RandomModel) -> Any:
    """Make a tokenizer, or the processor of a model with vision.

    Pillow scales pictures, so torchvision is not needed.
    """
    vision = shape.vision
    if vision is None:
        return make_tokenizer(calls_tools=shape.tools)
    from transformers import LlavaProcessor  # noqa: PLC0415 - only where a model sees
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil  # noqa: PLC0415

    size = {"height": vision.image_size, "width": vision.image_size}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=make_tokenizer(sees=True),
        patch_size=vision.patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=scratch.IMAGE,
        chat_template=scratch.CHAT_TEMPLATE,
    )
