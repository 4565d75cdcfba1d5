"""Load exports by transformers, of whatever version this Python has; write the tokens and log-probabilities.

    python tests/loaders/by_transformers.py SPEC OUTPUT

SPEC is JSON with `exports` (folders by name), `texts` and `talk`; OUTPUT becomes an .npz with, for each export,
`<name>/tokens/<i>` and `<name>/scores/<i>` of each text, the last that of the talk by the chat template.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def read(folder: Path, texts: list[str], talk: list[dict[str, str]]) -> dict[str, Any]:
    """Return tokens and scores of each text: log-probabilities, or a reward model's scores."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (kind,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    scores_rows = kind.endswith("ForSequenceClassification")
    loader = AutoModelForSequenceClassification if scores_rows else AutoModelForCausalLM
    model = loader.from_pretrained(folder, torch_dtype="auto").float().eval()
    rendered = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    rows.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    found: dict[str, Any] = {"ends": np.array([tokenizer.eos_token_id, tokenizer.pad_token_id])}
    for number, row in enumerate(rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0]
        found[f"tokens/{number}"] = np.array(row)
        found[f"scores/{number}"] = (logits if scores_rows else logits.log_softmax(-1)).numpy()
    return found


def main() -> None:
    """Command line."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {}
    for name, folder in spec["exports"].items():
        for key, value in read(Path(folder), spec["texts"], spec["talk"]).items():
            found[f"{name}/{key}"] = value
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
