"""Score responses by a reward model."""

from pathlib import Path

import torch

from scripts.evaluate.score import load_export
from scripts.rows.kinds import Row
from scripts.rows.messages import tools_of
from scripts.rows.prompts import prompt_of, render


class Ranker:
    """A reward model that scores responses to prompts."""

    def __init__(self, export: Path, accelerator: str) -> None:
        self.model, self.tokenizer = load_export(export, accelerator)
        self.model.eval()

    @torch.inference_mode()
    def scores(self, row: Row, responses: list[str]) -> list[float]:
        """Return the score of each response, read in the reward model's own chat template."""
        texts = [
            render([*prompt_of(row), {"role": "assistant", "content": text}], self.tokenizer, tools=tools_of(row))
            for text in responses
        ]
        options = {"padding": True, "padding_side": "right", "add_special_tokens": False, "return_tensors": "pt"}
        inputs = self.tokenizer(text=texts, **options).to(self.model.device)
        return self.model(**inputs).logits[:, 0].float().tolist()
