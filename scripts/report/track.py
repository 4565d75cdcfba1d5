"""Record a published stage in Weights & Biases: a run of the stage's identity with data and checkpoints as artifacts.

DataBlendsArtifact-<stage> and each parent's ModelArtifact-<parent> go in, ModelArtifact-<stage> comes out. Artifacts
hold references (file://) with checksums; files stay in place. Curves come from the trainer's own `report_to`.
WANDB_API_KEY stays in the environment.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from scripts.errors import UserError
from scripts.files import write_json
from scripts.names import fault_of_file
from scripts.program import run_command_line
from scripts.report.chain import Link, read_chain

ADVICE = "W&B is not installed; python -m pip install 'stagecoach-workflow[wandb]', or take tracking out of the config"
TIMEOUTS = {"init_timeout": 60.0, "finish_timeout": 600.0}
QUIET = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}


def main(
    checkpoint: Annotated[Path, "such as results/rlhf/ckpt"],
    project: Annotated[str, "W&B's project"],
    folder: Annotated[Path, "for W&B's local files"],
    output: Annotated[Path, "tracking.json"],
    entity: Annotated[str | None, "W&B's team or user; default: the account"] = None,
) -> None:
    """Record a published stage, and write tracking.json with the run's place."""
    try:
        import wandb  # noqa: PLC0415  (optional)
    except ImportError:
        raise UserError(ADVICE) from None
    *ancestors, link = read_chain(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "project": project,
        "entity": entity,
        "id": link.record["identity"],
        "name": link.name,
        "group": link.run_name,
        "config": link.settings or {},
        "dir": folder,
        "settings": wandb.Settings(**TIMEOUTS, **QUIET),
    }
    try:
        run = wandb.init(**options, resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow")
    except (wandb.errors.CommError, wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        print(f"{link.name}: W&B cannot be used now ({str(error).partition(chr(10))[0]})")
        wandb.teardown()  # its service still holds the run that did not begin
        run = wandb.init(**options, mode="offline")
    try:
        inputs = [_checkpoint(wandb, parent) for parent in ancestors if parent.name in link.parents]
        if link.blend:
            data = wandb.Artifact(f"DataBlendsArtifact-{link.name}", type="dataset", metadata=link.record["data"])
            for path in sorted(link.blend.glob("*-split.jsonl")):
                data.add_reference(path.absolute().as_uri(), name=path.name)
            inputs.append(data)
        for artifact in inputs:
            if run.offline:  # use_artifact refuses offline; a sync does the same later
                run._log_artifact(artifact, aliases=[], is_user_created=True, use_after_commit=True)
            else:
                run.use_artifact(artifact)
        run.log_artifact(_checkpoint(wandb, link))
    finally:
        run.finish()
    if run.offline:
        print(f"{link.name}: kept offline; send it with: wandb sync {Path(run.dir).parent}")
    url = None if run.offline else run.url
    write_json(output, {"project": project, "entity": entity, "run": run.id, "url": url})


def _checkpoint(wandb: Any, link: Link) -> Any:
    metadata = {key: link.record[key] for key in ("stage", "step", "identity")} | {"content": link.content}
    artifact = wandb.Artifact(f"ModelArtifact-{link.name}", type="model", metadata=metadata)
    if link.on_disk:
        weights = (link.paths.ckpt / "weights").resolve()
        for name in link.record["files"]:
            if fault := fault_of_file(weights, name):
                raise UserError(f"{weights / name}: {fault}, by {link.paths.record}, so nothing is recorded of it")
            artifact.add_reference((weights / name).as_uri(), name=name)
    return artifact


if __name__ == "__main__":
    run_command_line(main)
