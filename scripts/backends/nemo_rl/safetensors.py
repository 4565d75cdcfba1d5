"""Rewrite a folder's pytorch_model.bin as model.safetensors, sharded where it is large.

Run in a container of NeMo-RL, which gets this text instead of a file (python -c), so it imports nothing of ours.
"""

import json
import sys
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

OUTPUT, INPUT = "lm_head.weight", ("embed_tokens.weight", "embeddings.weight")


def rewrite(folder: Path) -> None:
    """Replace the file; an output layer that is the input's once more is left out, as the model's config ties them."""
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
