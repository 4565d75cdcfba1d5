"""Log a published stage to Weights & Biases: its config and metrics as a run, splits and checkpoints as artifacts.

Files stay where they are: an artifact holds references (file://) with checksums. Where W&B cannot be reached, the run
is kept in files beside the stage, and a line says how to send it. WANDB_API_KEY stays in the environment.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from scripts.errors import UserError, run_program
from scripts.files import write_json
from scripts.records import Evaluation, read_if_there
from scripts.report.chain import Link, read_chain
from scripts.stage.tables import METRICS, read_table

if TYPE_CHECKING:
    import wandb

ADVICE = "W&B is not installed; python -m pip install 'stagecoach-workflow[wandb]', or take tracking out of the config"
MAPS = {"reward": "environment_rewards", "timing": "timing"}
INIT_SECONDS = 60.0
FINISH_SECONDS = 600.0


def track(ckpt: Path, project: str, entity: str | None, folder: Path) -> dict[str, Any]:
    """Log a stage as the run of its identity; what was logged. W&B's own files go below `folder`."""
    try:
        import wandb  # noqa: PLC0415  (optional)
    except ImportError:
        raise UserError(ADVICE) from None
    chain = read_chain(ckpt)
    link = chain.last
    folder.mkdir(parents=True, exist_ok=True)
    run = _start(wandb, link, project, entity, folder)
    try:
        for parent in link.parents:
            _use(run, _checkpoint(wandb, chain.links[parent]))
        if link.blend:
            _use(run, _splits(wandb, link))
        _log_metrics(run, read_table(link.paths.metrics, METRICS).to_pandas())
        run.summary.update(_scores(link.paths.evaluation))
        run.log_artifact(_checkpoint(wandb, link))
    finally:
        run.finish()
    tracked = {"project": project, "entity": entity, "run": run.id, "mode": "offline" if run.offline else "online"}
    if run.offline:
        print(f"{link.name}: kept offline; send it with: wandb sync {Path(run.dir).parent}")
    return tracked | {"url": None if run.offline else run.url}


def _start(wandb: Any, link: Link, project: str, entity: str | None, folder: Path) -> "wandb.Run":
    """The run of a stage's identity, begun or gone on with; offline where W&B does not answer."""
    record = link.record
    origin = {key: record.get(key) for key in ("identity", "step", "seed", "release", "data", "trained_by")}
    options = {
        "project": project,
        "entity": entity,
        "id": record["identity"],
        "name": link.name,
        "group": link.run_name,
        "job_type": (link.settings or {}).get("algorithm"),
        "config": (link.settings or {}) | {"stagecoach": origin},
        "dir": folder,
    }
    quiet = {"disable_git": True, "disable_code": True, "x_disable_stats": True, "x_disable_meta": True}
    limits = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
    settings = wandb.Settings(console="off", silent=True, **limits, **quiet)
    offline = os.environ.get("WANDB_MODE") == "offline"
    try:
        return wandb.init(**options, resume=None if offline else "allow", settings=settings)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        print(f"{link.name}: W&B cannot be used now ({str(error).partition(chr(10))[0]})")
        wandb.teardown()  # its service still holds the run that did not begin
        return wandb.init(**options, mode="offline", settings=settings)


def _use(run: "wandb.Run", artifact: "wandb.Artifact") -> None:
    """Declare an input. Offline, use_artifact refuses; what it does online is then noted for the sync."""
    if run.offline:
        run._log_artifact(artifact, aliases=[], is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact)


def _artifact(wandb: Any, link: Link, name: str, kind: str, metadata: dict[str, Any]) -> "wandb.Artifact":
    return wandb.Artifact(f"{link.run_name}-{name}", type=kind, metadata=metadata)


def _splits(wandb: Any, link: Link) -> "wandb.Artifact":
    """A stage's splits by reference."""
    data = link.record["data"]
    artifact = _artifact(wandb, link, f"{data['blend']}-splits", "dataset", data)
    for path in sorted(link.blend.glob("*-split.jsonl")):
        artifact.add_reference(path.absolute().as_uri(), name=path.name)
    return artifact


def _checkpoint(wandb: Any, link: Link) -> "wandb.Artifact":
    """A stage's checkpoint by reference; the same files give the same version, whichever stage names it."""
    metadata = {key: link.record[key] for key in ("stage", "step", "identity")} | {"content": link.content}
    artifact = _artifact(wandb, link, f"{link.name}-checkpoint", "model", metadata)
    if link.on_disk:
        weights = (link.paths.ckpt / "weights").resolve()
        for name in link.record["files"]:
            artifact.add_reference((weights / name).as_uri(), name=name)
    return artifact


def _log_metrics(run: "wandb.Run", metrics: pd.DataFrame) -> None:
    for row in metrics.to_dict("records"):
        parts = {kind: dict(row.pop(column, None) or {}) for kind, column in MAPS.items()}
        step = int(row.pop("step"))
        values = {name: value for name, value in row.items() if pd.notna(value)}
        named = {f"{kind}/{name}": value for kind, part in parts.items() for name, value in part.items()}
        run.log(values | named, step=step)


def _scores(path: Path) -> dict[str, float]:
    """The held-out scores, where a stage has some."""
    evaluation = read_if_there(path, Evaluation) or {"environments": {}}
    return {
        f"held_out/{name}/{when}": entry[when]
        for name, entry in evaluation["environments"].items()
        for when in ("before", "after")
        if entry[when] is not None
    }


def main() -> None:
    """Command line of the tracking."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.track", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="such as results/rlhf/ckpt")
    parser.add_argument("--project", required=True, help="of W&B")
    parser.add_argument("--entity", help="team or user of W&B; none: the account's own")
    parser.add_argument("--folder", type=Path, required=True, help="for W&B's own files")
    parser.add_argument("--output", type=Path, required=True, help="record of what was logged")
    arguments = parser.parse_args()
    write_json(arguments.output, track(arguments.checkpoint, arguments.project, arguments.entity, arguments.folder))


if __name__ == "__main__":
    run_program(main)
