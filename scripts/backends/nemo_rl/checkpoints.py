"""NeMo-RL's checkpoints: whole or not, sealed by a list of files, and the step that an attempt reaches from one.

NeMo-RL publishes ``step_N`` by a rename once written. The list has sizes, and hashes of small files and of the largest
shard, enough to tell two checkpoints apart; terabytes are not hashed.

A stage that goes on with its parent's optimizer has the parent's checkpoint as the first of its own run. NeMo-RL
resumes from the newest ``step_N`` of its folder, and leaves the data loader's position aside where the saved config
names another data set (``nemo_rl/data/utils.py``, since v0.7.0). So the checkpoint laid in names a data set that no
config has, and the rows begin with the first.

Asynchronous GRPO reaches a step from a checkpoint before waiting for ever for rows. By the sources of v0.6.0, v0.7.0
and super-v3: a thread fetches a batch, waits until a step within ``max_trajectory_age_steps`` wants prompts, and gives
the whole batch to the step, even where few prompt groups were missing. A checkpoint holds the loader's position, ahead
of training, and the generated groups; groups in the making are lost. At the end of the data v0.6.0 and v0.7.0 also drop
the groups in the making, of up to the last ``max_trajectory_age_steps + 1`` steps. A loader resumed at the end of the
data begins a second pass, which is left out here.
"""

import json
import pickle
import shutil
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.protocol import TrainingJob
from scripts.errors import UserError
from scripts.files import describe_files, link_or_copy, read_json, replace_directory, write_json, write_text
from scripts.records import Reach
from scripts.stage.rundir import FILES, Checkpoint, step_of
from scripts.stage.training_folder import TrainingFolder

SMALL_BYTES = 1 << 20
WEIGHTS = "policy/weights/"
MEGATRON = Path("policy/weights/iter_0000000")
LOADER, BUFFER = "train_dataloader.pt", "replay_buffer.pt"
TRACKER = "latest_checkpointed_iteration.txt"
BEFORE = "before-continuing"
"""The data set that a checkpoint names where the rows begin anew."""
LEFT = (FILES, BUFFER, "training_info.json", "config.yaml")
WITHIN_EPOCH = ("current_epoch", "epoch", "step")


def missing_file(iteration: Path) -> str | None:
    """Return the name of a file that a half-written iteration of Megatron Bridge lacks; None for a whole one."""
    return next((name for name in ("run_config.yaml", "metadata.json") if not (iteration / name).is_file()), None)


def reason_unfinished(path: Path) -> str | None:
    """Return why a step's directory is no whole checkpoint; None for a whole one."""
    for prefix in ("tmp_", "old_"):
        if path.with_name(f"{prefix}{path.name}").exists():
            return f"{prefix}{path.name} stands beside it"
    try:
        json.loads((path / "training_info.json").read_text(encoding="utf-8"))
        yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        return f"training_info.json or config.yaml cannot be read ({error})"
    if not any(path.glob("train_dataloader*.pt")):
        return "train_dataloader.pt is missing"
    if (path / WEIGHTS / TRACKER).exists() or (path / MEGATRON).exists():
        missing = missing_file(path / MEGATRON)
        return f"{MEGATRON}/{missing} is missing" if missing else None
    return None if any((path / WEIGHTS).rglob("*")) else "policy/weights is empty"


def seal_finished(training: TrainingFolder) -> list[Checkpoint]:
    """List the files of every whole checkpoint without a list; return the checkpoints sealed now."""
    sealed = []
    for path in training.step_folders:
        if not (path / FILES).exists() and reason_unfinished(path) is None:
            write_json(path / FILES, _describe(path))
            sealed.append(Checkpoint.at(path))
    return sealed


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    hashed = largest_shard(sizes)
    large = [name for name, size in sizes.items() if size > SMALL_BYTES and name != hashed]
    return describe_files(directory, {name: {"bytes": sizes[name], "sha256": None} for name in large})


def largest_shard(sizes: dict[str, int]) -> str | None:
    """Return the name of the weights' largest shard; small shards may be alike from step to step."""
    shards = [name for name in sizes if name.startswith(WEIGHTS) and name.endswith((".distcp", ".safetensors"))]
    return max(shards, key=lambda name: sizes[name], default=None)


def refuse_repeated_weights(training: TrainingFolder) -> None:
    """UserError when a checkpoint repeats the weights before, as asynchronous saving did (NeMo-RL issue 3312).

    The checkpoint is renamed, so that nothing resumes from there or publishes the weights.
    """
    for before, after in pairwise(training.checkpoints):
        if same := _same_shard(before, after):
            aside = _set_aside(after.path, "repeated")
            raise UserError(
                f"{aside}: {same} is byte for byte that of {before.path.name}, so saving repeats old weights (NeMo-RL "
                "issue 3312); set policy.megatron_cfg.checkpoint.async_save to false and train on"
            )


def _same_shard(before: Checkpoint, after: Checkpoint) -> str | None:
    """Return the name of the largest shard where both checkpoints have the same; None where not."""
    try:
        old, new = before.files, after.files
    except UserError:  # NeMo-RL has just removed a checkpoint
        return None
    shard = largest_shard({name: file["bytes"] for name, file in new.items()})
    return shard if shard is not None and old.get(shard) == new[shard] else None


def _set_aside(path: Path, why: str) -> Path:
    times = len(list(path.parent.glob(f"{why}_{path.name}.*")))
    return path.rename(path.with_name(f"{why}_{path.name}.{times + 1}"))


def pass_over_newer(training: TrainingFolder, resume_from: Path | None) -> None:
    """Rename checkpoints above the resumed step, since NeMo-RL resumes from the highest number."""
    newest = step_of(resume_from) if resume_from else 0
    for path in training.step_folders:
        if step_of(path) > newest:
            _set_aside(path, "passed_over")


def lay_in(training: TrainingFolder, parent: Checkpoint, config: NemoRlSettings) -> Checkpoint:
    """Make the parent's checkpoint one of this run, by hard links; return it.

    `current_step` counts an epoch's steps, or all steps where training is asynchronous.
    """
    laid = training.checkpoint(parent.step)
    if not (laid.path / FILES).exists():
        with replace_directory(laid.path) as fresh:
            ignored = shutil.ignore_patterns(*LEFT)
            shutil.copytree(parent.path, fresh, copy_function=link_or_copy, ignore=ignored, dirs_exist_ok=True)
            within = WITHIN_EPOCH if config.is_asynchronous else (*WITHIN_EPOCH, "current_step")
            info = read_json(parent.path / "training_info.json")
            write_json(fresh / "training_info.json", info | dict.fromkeys(info.keys() & within, 0))
            saved = yaml.safe_load((parent.path / "config.yaml").read_text(encoding="utf-8"))
            saved["data"]["train"] = {"dataset_name": BEFORE}
            write_text(fresh / "config.yaml", yaml.safe_dump(saved))
        seal_finished(training)
    return laid


def reach_of(
    config: NemoRlSettings, training: TrainingFolder, checkpoint: Checkpoint | None, planned: int, rows: int
) -> Reach:
    """Return the step an attempt reaches from a checkpoint (None: fresh), as noted or by the checkpoint's files.

    Asynchronous training loses rows at every resume. `planned` may come before the config's last step.
    """
    start, last = checkpoint.step if checkpoint else 0, config.planned_step(rows) or planned
    reach = training.noted_reach(start) if config.is_asynchronous else Reach(planned)
    if reach is None and checkpoint is not None and start < last:
        step = min(last, sure_step(checkpoint, rows))
        reach = Reach(step, is_end=step < last)
        training.note_reach(start, reach)
    return reach if reach and reach.step <= planned else Reach(planned)


def note_sealed(job: TrainingJob, checkpoint: Checkpoint) -> None:
    """Note the step an attempt would reach from this job's checkpoint.

    Where the job aimed at the checkpoint's step as the end of the data, nothing is left to train.
    """
    aimed = job.training.noted_reach(job.start)
    if aimed is not None and aimed.is_end and aimed.step == checkpoint.step:
        job.training.note_reach(checkpoint.step, aimed)
    try:
        reach_of(job.config, job.training, checkpoint, job.planned, job.rows)
    except UserError as error:  # raised again where an attempt would resume
        print(f"{job.stage}: {error}", flush=True)


def note_standstill(job: TrainingJob, newest: Checkpoint | None, logged: int, data_ended: bool) -> None:
    """After a standstill at step `logged`, aim no further from the newest checkpoint, so that trained steps are saved.

    Where the data had ended (a failed prompt group takes the place of a batch), the stage ends there.
    """
    start = newest.step if newest else 0
    known = reach_of(job.config, job.training, newest, job.planned, job.rows)
    if logged < known.step and (data_ended or logged > start):
        job.training.note_reach(start, Reach(logged, is_end=data_ended))


def sure_step(checkpoint: Checkpoint, rows: int) -> int:
    """Return the last step surely reached from a checkpoint of asynchronous GRPO."""
    config = checkpoint.path / "config.yaml"
    try:
        saved = yaml.safe_load(config.read_text(encoding="utf-8"))
        grpo, train = saved["grpo"], saved.get("data", {}).get("train")
        prompts, age = grpo["num_prompts_per_step"], grpo["async_grpo"]["max_trajectory_age_steps"]
    except (KeyError, TypeError) as error:
        raise _unknown(config, f"no {error}") from None
    is_anew = isinstance(train, dict) and train.get("dataset_name") == BEFORE
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
