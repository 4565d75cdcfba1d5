"""Load exports by vLLM; write the tokens and log-probabilities, as by_transformers.py does, of models that generate.

python tests/loaders/by_vllm.py SPEC OUTPUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def read(folder: Path, texts: list[str], talk: list[dict[str, str]]) -> dict[str, Any]:
    """Return tokens and log-probabilities of each text; of its last token no probabilities follow."""
    model = LLM(str(folder), dtype="float32", max_model_len=128, max_logprobs=-1, enforce_eager=True, seed=0)
    tokenizer = model.get_tokenizer()
    rendered = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    rows.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    options = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1)
    answers = model.generate([TokensPrompt(prompt_token_ids=row) for row in rows], options, use_tqdm=False)
    found: dict[str, Any] = {"ends": np.array([tokenizer.eos_token_id, tokenizer.pad_token_id])}
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        places = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
        found[f"tokens/{number}"] = np.array(row)
        found[f"scores/{number}"] = np.array([[place[token].logprob for token in sorted(place)] for place in places])
    return found


def main() -> None:
    """Command line."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {}
    for name, folder in spec["exports"].items():
        if "reward model" in name:
            continue
        for key, value in read(Path(folder), spec["texts"], spec["talk"]).items():
            found[f"{name}/{key}"] = value
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
