"""Rewrite a folder's pytorch_model.bin as model.safetensors, sharded where large.

Containers of NeMo-RL run this text (python -c), so nothing of ours is imported.
"""

import json
import sys
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

OUTPUT, INPUT = "lm_head.weight", ("embed_tokens.weight", "embeddings.weight")


def rewrite(folder: Path) -> None:
    """Replace the file; leave out an output layer tied to the input's by the model's config."""
    pickled = folder / "pytorch_model.bin"
    tensors = torch.load(pickled, map_location="cpu", mmap=True, weights_only=True)
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        tied = [tensor for name, tensor in tensors.items() if name.endswith(INPUT)]
        if OUTPUT in tensors and any(torch.equal(tensors[OUTPUT], tensor) for tensor in tied):
            del tensors[OUTPUT]
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    pickled.unlink()


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
