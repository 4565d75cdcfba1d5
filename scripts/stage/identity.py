"""What a stage trains: the facts that may change its weights, and one hash of them."""

from pathlib import Path

from scripts.files import canonical_json, sha256_text
from scripts.recipe.stage import TrainingConfig
from scripts.records import ExportRecord, Facts, Manifest, read_record


def stage_facts(config: TrainingConfig, manifest: Path, parent_export: Path | None) -> Facts:
    """The facts of a stage: its resolved config, the content of its splits and of the export it starts from.

    The backend's pinned release is part of the config. Of the manifest only the splits' hashes count, of the
    parent only its export's content: the same data at another revision, or a parent trained again to the same
    weights, is the same stage.
    """
    splits = read_record(manifest, Manifest)
    parent = None if parent_export is None else read_record(parent_export, ExportRecord)
    return {
        "config": config.content,
        "train_split": splits["train"]["sha256"],
        "validation_split": splits["validation"]["sha256"],
        "parent_export": parent["content"] if parent else None,
    }


def identity_of(facts: Facts) -> str:
    """The identity: the first 16 hex digits of the SHA-256 of the facts."""
    return sha256_text(canonical_json(facts))[:16]
