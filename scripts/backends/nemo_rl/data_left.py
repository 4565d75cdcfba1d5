"""The step that asynchronous GRPO reaches from a checkpoint before waiting for ever for rows.

By the sources of v0.6.0, v0.7.0 and super-v3: a thread fetches a batch, waits until a step within
``max_trajectory_age_steps`` wants prompts, and gives the whole batch to the step, even where few prompt groups were
missing. A checkpoint holds the loader's position, ahead of training, and the generated groups; groups in the making are
lost. At the end of the data v0.6.0 and v0.7.0 also drop the groups in the making, of up to the last
``max_trajectory_age_steps + 1`` steps. A loader resumed at the end of the data begins a second pass, which is left out
here.
"""

import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.checkpoints import begins_anew
from scripts.backends.nemo_rl.training import NemoRlConfig
from scripts.backends.protocol import TrainingJob
from scripts.errors import UserError
from scripts.stage.progress import Reach, note_reach, noted_reach
from scripts.stage.rundir import Checkpoint

LOADER, BUFFER = "train_dataloader.pt", "replay_buffer.pt"


def reach_of(config: NemoRlConfig, run: Path, checkpoint: Checkpoint | None, planned: int, rows: int) -> Reach:
    """Return the step an attempt reaches from a checkpoint (None: fresh), as noted or by the checkpoint's files.

    Asynchronous training loses rows at every resume. `planned` may come before the config's last step.
    """
    start, last = checkpoint.step if checkpoint else 0, config.planned_step(rows) or planned
    reach = noted_reach(run, start) if config.is_asynchronous else Reach(planned)
    if reach is None and checkpoint is not None and start < last:
        step = min(last, sure_step(checkpoint, rows))
        note_reach(run, start, reach := Reach(step, is_end=step < last))
    return reach if reach and reach.step <= planned else Reach(planned)


def note_sealed(job: TrainingJob, checkpoint: Checkpoint) -> None:
    """Note the step an attempt would reach from this job's checkpoint.

    Where the job aimed at the checkpoint's step as the end of the data, nothing is left to train.
    """
    aimed = noted_reach(job.run, job.start)
    if aimed is not None and aimed.is_end and aimed.step == checkpoint.step:
        note_reach(job.run, checkpoint.step, aimed)
    try:
        reach_of(job.config, job.run, checkpoint, job.planned, job.rows)
    except UserError as error:  # raised again where an attempt would resume
        print(f"{job.stage}: {error}", flush=True)


def note_standstill(job: TrainingJob, newest: Checkpoint | None, logged: int, data_ended: bool) -> None:
    """After a standstill at step `logged`, aim no further from the newest checkpoint, so that trained steps are saved.

    Where the data had ended (a failed prompt group takes the place of a batch), the stage ends there.
    """
    start = newest.step if newest else 0
    known = reach_of(job.config, job.run, newest, job.planned, job.rows)
    if logged < known.step and (data_ended or logged > start):
        note_reach(job.run, start, Reach(logged, is_end=data_ended))


def sure_step(checkpoint: Checkpoint, rows: int) -> int:
    """Return the last step surely reached from a checkpoint of asynchronous GRPO."""
    config = checkpoint.path / "config.yaml"
    try:
        saved = yaml.safe_load(config.read_text(encoding="utf-8"))
        grpo, is_anew = saved["grpo"], begins_anew(saved)
        prompts, age = grpo["num_prompts_per_step"], grpo["async_grpo"]["max_trajectory_age_steps"]
    except (KeyError, TypeError) as error:
        raise _unknown(config, f"no {error}") from None
    taken = 0 if is_anew else batches_taken(checkpoint.path / LOADER, rows // prompts)
    left = max(0, rows // prompts - taken)
    return reached(checkpoint.step, left, generated_steps(checkpoint.path / BUFFER, prompts), age)


def reached(start: int, left: int, generated: set[int], age: int) -> int:
    """Return the steps trained in all, from `start` trained steps, `left` batches and whole steps `generated`.

    Steps count from 0, as in the loop: after `start` steps the next is step `start`.
    """
    last, served = start, 0
    while served < left:
        served += last not in generated
        last += 1
    step = max(start, last - 1 - age) if left else start
    while step in generated:
        step += 1
    return step


def batches_taken(path: Path, batches: int) -> int:
    """Return the batches given out by a saved loader of `batches`; all of them at the end of the data."""
    state = read_torch_file(path)
    try:
        if state["_iterator_finished"]:
            return batches
        if "_snapshot" in state:
            return state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        return state["_num_yielded"]
    except (KeyError, TypeError) as error:
        raise _unknown(path, f"no {error} as torchdata's StatefulDataLoader writes it") from None


def generated_steps(path: Path, prompts: int) -> set[int]:
    """Return the steps whose prompt groups are all in a saved replay buffer; none without a buffer."""
    if not path.exists():
        return set()
    try:
        counts = Counter(read_torch_file(path)["target_weight_versions"])
    except (KeyError, TypeError) as error:
        raise _unknown(path, f"no {error} as NeMo-RL's replay buffer writes it") from None
    return {step for step, groups in counts.items() if groups >= prompts}


class _Ignored:
    """Stand for every object besides plain values, and do nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "_Ignored":
        return super().__new__(cls)

    def _ignore(self, *_: Any, **__: Any) -> "_Ignored":
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = update = _ignore


class _PlainUnpickler(pickle.Unpickler):
    """Read the plain values of a pickle, without importing or calling named code."""

    def find_class(self, module: str, name: str) -> type[_Ignored]:
        return _Ignored

    def persistent_load(self, _: Any) -> _Ignored:
        return _Ignored()


def read_torch_file(path: Path) -> Any:
    """Return the plain values of a file of torch.save, without torch and without running code."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                return _PlainUnpickler(file).load()
    except FileNotFoundError:
        raise _unknown(path, "it is missing") from None
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise _unknown(path, f"{type(error).__name__}: {error}") from None


def _unknown(path: Path, why: str) -> UserError:
    return UserError(
        f"{path}: it does not tell how many rows are left ({why}), and asynchronous training waits for ever when they "
        f"end; to resume from the checkpoint before, rename {path.parent.name}"
    )
