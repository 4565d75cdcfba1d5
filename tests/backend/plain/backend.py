"""Trains: each step's rows follow those of the step before, so a resumed training goes on as it would have."""

import json
import time

from scripts.backends.protocol import Allocation, Backend, TrainingJob
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.rows.jsonl import read_rows
from scripts.rows.prompts import render
from scripts.stage.store import prune_checkpoints


class Plain(Backend):
    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        import torch

        config, folder = job.config, job.resume_from or job.parent_model
        model, tokenizer = load_model(folder), load_processor(folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        texts = [render(row["messages"], tokenizer) for _, _, row in read_rows(job.train_split)]
        for step in range(job.start + 1, job.max_num_steps + 1):
            started, first = time.monotonic(), (step - 1) * config.rows_per_step
            chosen = [texts[number % len(texts)] for number in range(first, first + config.rows_per_step)]
            options = {"max_length": config.max_length, "truncation": True, "padding": True, "return_tensors": "pt"}
            batch = tokenizer(chosen, **options)
            loss = model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.monotonic() - started
            entry = {"step": step, "loss": loss.item(), "grad_norm": norm, "lr": config.lr, "seconds": seconds}
            with (job.run / "metrics.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            stops = job.stop.is_due(seconds, seconds)
            if stops or step == job.max_num_steps or step % job.settings.checkpointing.save_period == 0:
                saved = job.run / "saving"
                for part in (model, tokenizer):
                    part.save_pretrained(saved)
                job.training.seal(saved, step)
                prune_checkpoints(job.training, job.settings.checkpointing)
            if stops:
                return


BACKEND = Plain()
