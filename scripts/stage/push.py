"""Push a training to a remote store: what a stage has published, or each new checkpoint while it trains."""

import time
from pathlib import Path
from typing import Annotated, Any

from scripts.errors import UserError
from scripts.files import write_json
from scripts.program import run_command_line
from scripts.recipe.config import Store
from scripts.records import CheckpointRecord, read_record
from scripts.remote.remote_store import RemoteStore
from scripts.stage.remote import push
from scripts.stage.rundir import newest_step

PAUSE = 10.0


def push_published(store: RemoteStore, ckpt: Path, weights: bool) -> dict[str, Any]:
    """Push what a stage has published, with the checkpoint's own `weights`; return a record of the push."""
    record = read_record(ckpt / "record.json", CheckpointRecord)
    run = (ckpt / "weights").resolve().parents[1]
    sent = push(store, run, record["stage"], record["step"], weights)
    return {"remote": store.url, "identity": record["identity"], "step": record["step"], "sent": sent}


def follow(store: RemoteStore, run: Path, stage: str) -> None:
    """Push each new checkpoint of a training until the process is ended; the one before is no longer kept then."""
    done, before = 0, None
    while True:
        if (step := newest_step(run)) > done:
            done = step
            try:
                sent = push(store, run, stage, step, is_passing=True)
                print(f"{stage}: pushed step {step} to {store.url}, {sent} bytes", flush=True)
                if before and store.manifest(run.name, before).get("is_passing"):
                    store.remove([(run.name, before)], ())
                before = step
            except UserError as error:
                print(f"{stage}: step {step} is not pushed: {error}", flush=True)
        time.sleep(PAUSE)


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
        follow(RemoteStore.of(asked), run, stage)
    write_json(output, push_published(RemoteStore.of(asked), ckpt, "published" in asked.push))


if __name__ == "__main__":
    run_command_line(main)
