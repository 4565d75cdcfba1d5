"""On-policy distillation by TRL's DistillationTrainer, from one teacher or several, in turns."""

import json
import math
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from trl import DistillationConfig, DistillationTrainer
from trl.kernels import chunked_logprob
from trl.trainer import distillation_trainer as trl_distillation
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.grpo import DIVERGENCE_PREFIX, ROLLOUT_SECONDS
from scripts.backends.trl.grpo_trainer import sampling_arguments, set_sampler, with_pictures
from scripts.backends.trl.setup import shared_arguments, start_and_rows
from scripts.backends.trl.skipping import some_rows, split_by_length
from scripts.errors import UserError
from scripts.model.generate import sampled_by_arguments
from scripts.model.loading import fill_model, load_model

TEACHER = "teacher"
# What TRL hands to a model besides tokens, mask and the number of states to keep
PICTURES = [*signature(DistillationTrainer._get_last_hidden_state).parameters][5:]


def make_trainer(job: TrainingJob) -> DistillationTrainer:
    """Make the trainer on prompts in the order of the job."""
    start, rows = start_and_rows(job)
    arguments = DistillationConfig(beta=job.config.loss_fn.weight, **sampling_arguments(job), **shared_arguments(job))
    trainer = TurnsTrainer(args=arguments, train_dataset=with_pictures(rows, job.train_split), **start)
    trainer.teach(job)
    trl_distillation.split_tensor_dict = trainer.micro_batches
    trl_distillation._use_triton = (lambda _: True) if job.config.policy.skip_padding else chunked_logprob._use_triton
    set_sampler(trainer, job)
    return trainer


class TurnsTrainer(DistillationTrainer):
    """TRL's trainer with a teacher by a row's environment.

    Teachers are frozen and take turns: one is in memory. A step's rows are sorted by teacher, so each is loaded at most
    once a step; every other step goes backwards, and begins with the teacher that is there.
    """

    folders: list[Path]
    """The teachers' exports, each once."""

    def teach(self, job: TrainingJob) -> None:
        """Take the teachers of a job by role; roles with the same export share it."""
        roles = {name.removeprefix("teachers."): folder for name, folder in job.roles.items()}
        self.folders, self._turn = list(dict.fromkeys(roles.values())), None
        self._names = ["+".join(role for role in roles if roles[role] == folder) for folder in self.folders]
        self._places = {role: self.folders.index(folder) for role, folder in roles.items()}
        self._teaching = job.config.distillation
        is_rounded = job.accelerator != "cpu" or job.config.policy.precision == "bfloat16"
        self._precision = torch.bfloat16 if is_rounded else torch.float32  # which CPUs compute several times faster

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        """Tokenize texts without special tokens, since the chat template prints the first token."""
        if isinstance(prompts[0], str):
            return self._tokenizer(prompts, add_special_tokens=False)["input_ids"], None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Sample by the stage's settings alone."""
        with sampled_by_arguments(self.model):
            return super()._generate_single_turn(*arguments, **options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample responses, and note the teacher of each row."""
        started = time.monotonic()
        output = super()._generate_and_score_completions(inputs)
        self._metrics["train"][ROLLOUT_SECONDS].append(time.monotonic() - started)
        environments = [json.loads(given["row"])["agent_ref"]["name"] for given in inputs]
        places = [self._places[self._teaching.role_of(name, self._places)] for name in environments]
        output[TEACHER] = torch.tensor(places, device=self.accelerator.device)
        return output

    @property
    def _is_reversed(self) -> bool:
        return self.state.global_step % 2 == 1

    def micro_batches(self, batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Split a step's rows into micro-batches by teacher and length, in the order of the step."""
        batches = split_by_length(batch, count, updates=1)
        return batches[::-1] if self._is_reversed else batches

    def _taught(self, inputs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the rows of each teacher, while the teacher is there."""
        for place in sorted(inputs[TEACHER].unique().tolist(), reverse=self._is_reversed):
            if self._turn != place and not self._takes_over(self.folders[place]):
                self.teacher_model = None  # one goes before the next comes
                teacher = load_model(self.folders[place], self._precision).requires_grad_(False)
                self.teacher_model = teacher.to(self.accelerator.device)
            self._turn = place
            yield (inputs[TEACHER] == place).nonzero()[:, 0]

    def _takes_over(self, folder: Path) -> bool:
        """Let the teacher that is there become another of the same shape; tell whether it did."""
        return self._turn is not None and fill_model(self.teacher_model, self.folders[self._turn], folder)

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """Return the sums over the teachers of TRL's loss, entropy and tokens; the student computes all rows at once.

        `num_items_in_batch` divides every teacher's sum, so the sum of the losses is the loss.
        """
        ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        pictures = {name: inputs[name] for name in PICTURES if name in inputs}
        hidden = self._get_last_hidden_state(unwrapped_student, ids, mask, inputs["completion_ids"].size(1), **pictures)
        head, by_row = unwrapped_student.get_output_embeddings(), split_pixel_values_by_grid(inputs)
        weight = head.weight
        if isinstance(weight, DTensor):  # gathered once, however many teachers a process has rows of
            weight = weight.full_tensor().to(hidden.dtype)
        sums = []
        for rows in self._taught(inputs):
            student = SimpleNamespace(
                hidden=hidden[rows],
                config=unwrapped_student.config,
                get_output_embeddings=lambda: SimpleNamespace(weight=weight, bias=head.bias),
            )
            part = unsplit_pixel_values_by_grid({name: some_rows(value, rows) for name, value in by_row.items()})
            sums.append(super()._compute_loss(student, part, num_items_in_batch))
            divergence = (sums[-1][0].detach() * num_items_in_batch / sums[-1][2].clamp(min=1)).item()
            if not math.isfinite(divergence) and hidden[rows].isfinite().all():
                name, folder = self._names[self._turn], self.folders[self._turn]
                raise UserError(
                    f"teachers.{name}: its divergence from the student is no number ({divergence}), while the "
                    f"student's states are: the teacher {folder} is at fault, by its weights or in its precision; "
                    "learn from another one"
                )
            self._metrics["train"][f"{DIVERGENCE_PREFIX}{self._names[self._turn]}"].append(divergence)
        return tuple(map(sum, zip(*sums, strict=True)))

    def _get_last_hidden_state(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the student's states where they are computed already."""
        if isinstance(model, SimpleNamespace):
            return model.hidden
        return super()._get_last_hidden_state(model, *arguments, **options)
