"""What a stage trains: the facts that may change its weights, and one hash of them."""

from pathlib import Path
from typing import Any

from scripts.files import canonical_json, read_json, sha256_text
from scripts.recipe.stage import TrainingConfig


def stage_facts(config: TrainingConfig, manifest: Path, parent_export: Path | None) -> dict[str, Any]:
    """The facts of a stage: its resolved config, the content of its splits and of the export it starts from.

    The backend's pinned release is part of the config. Of the manifest only the splits' hashes count, of the
    parent only its export's content: the same data at another revision, or a parent trained again to the same
    weights, is the same stage.
    """
    splits = read_json(manifest)
    return {
        "config": config.content,
        "train_split": splits["train"]["sha256"],
        "validation_split": splits["validation"]["sha256"],
        "parent_export": None if parent_export is None else read_json(parent_export)["content"],
    }


def identity_of(facts: dict[str, Any]) -> str:
    """The identity: the first 16 hex digits of the SHA-256 of the facts."""
    return sha256_text(canonical_json(facts))[:16]
