"""Write small pretrained models with random weights, in the form of the transformers that runs this program.

    python tests/loaders/parents.py FOLDER ARCHITECTURE...

The rotary angles have a base of their own, so that a reader that misses it computes other logits.
"""

import json
import sys
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mistral", "phi3")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]
TEXT = ["What is the larger of the two numbers? Answer with the larger one in a box. There, that's 12 of 340 in all!"]


def tokenizer() -> Any:
    """A byte-level BPE tokenizer without a pad token, which a recipe has to name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, additional_special_tokens=SPECIALS[1:], eos_token="<|im_end|>", bos_token=SPECIALS[0]
    )
    made.chat_template = TEMPLATE
    return made


def save(architecture: str, folder: Path) -> None:
    """Save a model of an architecture, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tokenizer()
    torch.manual_seed(0)
    kind = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    shape = {
        "vocab_size": len(made),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_theta": 321.0,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": made.eos_token_id,
        "pad_token_id": None,
    }
    if architecture != "phi3":
        shape["head_dim"] = 32
    if architecture == "gemma3":
        # llama.cpp takes it that every sixth layer, and no other, sees all tokens
        shape |= {
            "rope_local_base_freq": 45.0,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 6,
        }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    if architecture == "phi3":  # as Phi-4 is published; llama.cpp's converter asks others for a SentencePiece model
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "GPT2Tokenizer"}
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        save(name, Path(sys.argv[1]) / name)
