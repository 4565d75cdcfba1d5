"""Small pretrained models in Hugging Face's format, one an architecture, with random weights and a trained tokenizer."""

from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mistral", "mixtral")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]


def tokenizer(**changes: Any) -> Any:
    """A byte-level BPE tokenizer of some merges, with the special tokens and chat template of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(["What is the larger of the two numbers? Answer with the larger one in a box."], trainer)
    chosen = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE} | changes
    template = chosen.pop("chat_template")
    made = PreTrainedTokenizerFast(tokenizer_object=fast, additional_special_tokens=SPECIALS[1:], **chosen)
    made.chat_template = template
    return made


def save_pretrained(
    architecture: str, folder: Path, max_shard_size: str = "5GB", head_dim: int = 16, **changes: Any
) -> None:
    """Save a model of an architecture with random weights; `changes` stand in for the tokenizer's tokens and template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tokenizer(**changes)
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(made),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "eos_token_id": made.eos_token_id,
        "pad_token_id": made.pad_token_id,
        "bos_token_id": None,
    }
    if architecture == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    kind = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    made.save_pretrained(folder)


def save_beginning(architecture: str, folder: Path, chat_template: str = TEMPLATE, head_dim: int = 16) -> None:
    """Save a model as its family is published: of Llama and Gemma, template and tokenizer both give a first token."""
    import json

    from tokenizers.processors import TemplateProcessing

    if architecture == "qwen3":
        return save_pretrained(architecture, folder, head_dim=head_dim, chat_template=chat_template)
    first = SPECIALS[3]
    begins = {"bos_token": first, "chat_template": "{{ bos_token }}" + chat_template}
    save_pretrained(architecture, folder, head_dim=head_dim, **begins)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    token = next(each["id"] for each in state["added_tokens"] if each["content"] == first)
    made = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, token)])
    path.write_text(json.dumps(state | {"post_processor": json.loads(made.__getstate__())}))
