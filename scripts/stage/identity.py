"""Identify a training: hash the facts that may change weights."""

from pathlib import Path

from scripts.files import canonical_json, sha256_text
from scripts.recipe.stage import TrainingConfig
from scripts.records import ExportRecord, Facts, Manifest, read_record


def stage_facts(config: TrainingConfig, manifest: Path, parent_export: Path | None) -> Facts:
    """Return the facts of a stage: resolved config with the pinned release, hashes of splits and parent's export.

    The same data at another revision, or a parent trained again to the same weights, give the same facts.
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
    """Return the identity: the first 16 hex digits of the SHA-256 of the facts."""
    return sha256_text(canonical_json(facts))[:16]
