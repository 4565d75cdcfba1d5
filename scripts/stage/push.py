"""Push a training to a remote store: what a stage has published, or each new checkpoint while it trains."""

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from scripts.errors import UserError
from scripts.files import write_json
from scripts.processes import end_with_parent
from scripts.program import run_command_line
from scripts.recipe.config import Store
from scripts.records import CheckpointRecord, read_record
from scripts.remote.pruning import prune
from scripts.remote.remote_store import GoneError, RemoteStore
from scripts.stage.remote import push
from scripts.stage.training_folder import TrainingFolder

PAUSE = 10.0
ENDING = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a process that follows a training, after a last push."""


def push_published(store: RemoteStore, ckpt: Path, weights: bool, is_hashed: bool = False) -> dict[str, Any]:
    """Push a published stage, with the checkpoint's `weights`; return a record of the push.

    With `is_hashed` objects there are read and hashed.
    """
    record = read_record(ckpt / "record.json", CheckpointRecord)
    sent = push(
        store, TrainingFolder.behind(ckpt / "weights"), record["stage"], record["step"], weights, is_hashed=is_hashed
    )
    return {"remote": store.url, "identity": record["identity"], "step": record["step"], "sent": sent}


def follow(store: RemoteStore, training: TrainingFolder, stage: str, ending: threading.Event) -> None:
    """Push every new checkpoint of a training, at the end the newest, and free the checkpoint pushed before.

    `ending` is set once the training has ended. A failed push is tried again with the next look.
    """
    done, is_last = 0, False
    while not is_last:
        is_last = ending.wait(PAUSE if done else 0.0)
        step = training.read_again().newest_step
        if step <= done:
            continue
        try:
            sent = push(store, training, stage, step, is_passing=True)
            print(f"{stage}: pushed step {step} to {store.url}, {sent} bytes", flush=True)
            done = step
            free_passing(store, training.name, step)
        except UserError as error:
            print(f"{stage}: step {step} is not pushed: {error}", flush=True)


def free_passing(store: RemoteStore, identity: str, step: int) -> None:
    """Remove passing steps of a training before `step` from the store, with objects."""
    store.look_again()
    passing: list[tuple[str, int]] = []
    for before in store.steps().get(identity, ()):
        if before >= step:
            continue
        with suppress(GoneError):
            entry = store.entry(identity, before)
            if entry.manifest and not entry.problem and entry.manifest.get("is_passing"):
                passing.append((identity, before))
    if passing:
        prune(store, passing, is_all=False)


def listen() -> threading.Event:
    """Return an event set by SIGTERM, at the end of the training, or by Ctrl-C."""
    ending = threading.Event()
    for number in ENDING:
        signal.signal(number, lambda *_: ending.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    return ending


def main(
    store: Annotated[str, "the remote store, as the config's `store` in JSON"],
    stage: Annotated[str, "the stage's name, for the store's list"],
    ckpt: Annotated[Path | None, "the published checkpoint's folder"] = None,
    run: Annotated[Path | None, "the folder of a training, to be followed while it trains"] = None,
    output: Annotated[Path | None, "the record to write"] = None,
) -> None:
    """Push the published checkpoint, or follow a training."""
    asked = Store.model_validate_json(store)
    if run:
        ending = listen()
        end_with_parent()
        follow(RemoteStore.of(asked), TrainingFolder(run), stage, ending)
        return
    write_json(output, push_published(RemoteStore.of(asked), ckpt, "published" in asked.push))


if __name__ == "__main__":
    run_command_line(main)
