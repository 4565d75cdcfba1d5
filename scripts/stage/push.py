"""Push a training to a remote store: what a stage has published, or each new checkpoint while it trains."""

import time
from pathlib import Path
from typing import Annotated

from scripts.errors import UserError
from scripts.files import write_json
from scripts.program import run_command_line
from scripts.records import CheckpointRecord, read_record
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import push
from scripts.stage.rundir import newest_step

PAUSE = 10.0


def push_published(store: RemoteStore, ckpt: Path, weights: bool) -> dict[str, str | int]:
    """Push what a stage has published; return the record of that."""
    record = read_record(ckpt / "record.json", CheckpointRecord)
    run = (ckpt / "weights").resolve().parents[1]
    sent = push(store, run, record["stage"], record["step"], weights)
    return {"remote": store.url, "identity": record["identity"], "step": record["step"], "sent": sent}


def follow(store: RemoteStore, run: Path, stage: str) -> None:
    """Push each new checkpoint of a training, until the process is ended; what fails is tried with the next."""
    pushed = 0
    while True:
        if (step := newest_step(run)) > pushed:
            try:
                print(f"{stage}: pushed step {step} to {store.url}, {push(store, run, stage, step)} bytes", flush=True)
            except UserError as error:
                print(f"{stage}: step {step} is not pushed: {error}", flush=True)
            pushed = step
        time.sleep(PAUSE)


def main(
    store: Annotated[str, "URL of the remote store"],
    stage: Annotated[str, "the stage's name, for the store's list"],
    ckpt: Annotated[Path | None, "the published checkpoint's folder"] = None,
    run: Annotated[Path | None, "the folder of a training, to be followed while it trains"] = None,
    exports_only: Annotated[bool, "leave the checkpoint's own files out"] = False,
    output: Annotated[Path | None, "the record to write"] = None,
) -> None:
    """Push the published checkpoint, or follow a training."""
    if run:
        follow(RemoteStore(store), run, stage)
    write_json(output, push_published(RemoteStore(store), ckpt, not exports_only))


if __name__ == "__main__":
    run_command_line(main)
