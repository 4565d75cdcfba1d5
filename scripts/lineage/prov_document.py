"""A chain in W3C PROV, by the library `prov`: datasets, splits, checkpoints and exports, and the trainings between."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.errors import UserError
from scripts.files import write_text
from scripts.lineage.chain import Chain, Link
from scripts.lineage.text import code_name, datasets_of, image_name, model_name

if TYPE_CHECKING:
    from prov.model import ProvDocument

NAMESPACE = "urn:stagecoach:"
ADVICE = "the library prov is not installed; python -m pip install --requirement envs/prov.txt"


def prov_document(chain: Chain) -> ProvDocument:
    """The chain as a PROV document; UserError where the optional library is missing."""
    try:
        from prov.model import ProvDocument  # noqa: PLC0415  (optional)
    except ImportError:
        raise UserError(f"--prov: {ADVICE}") from None
    document = ProvDocument()
    document.add_namespace("stagecoach", NAMESPACE)
    for link in chain.links.values():
        _add(document, link)
    return document


def write_prov(chain: Chain, path: Path) -> None:
    """Write the chain as PROV-JSON."""
    write_text(path, prov_document(chain).serialize(indent=2) + "\n")


def _add(document: ProvDocument, link: Link) -> None:
    """A stage: its training, which used data, code, image and what it starts from, and what was generated."""
    record, entity = link.record, partial(_entity, document)
    trained = {key: record.get(key) for key in ("step", "seed")} | {"config": record.get("facts", {}).get("config")}
    training = document.activity(
        _name("training", record["identity"]), other_attributes=_attributes(link.name, trained)
    )
    checkpoint = entity("checkpoint", record["identity"], link.name, {"step": record["step"]})
    document.wasGeneratedBy(checkpoint, training)
    for parent in record.get("parents", ()):
        export = entity("export", parent["content"], parent["stage"])
        document.used(training, export)
        document.wasDerivedFrom(checkpoint, export)
    if link.content:
        document.wasDerivedFrom(entity("export", link.content, link.name), checkpoint)
    if not link.parents:
        name, content = model_name(link), (record.get("model") or {}).get("content")
        document.used(training, entity("model", content or name, name, {"content": content}))
    if data := record.get("data"):
        blend = entity("blend", data["manifest"], data["blend"], {"manifest": data["manifest"]})
        document.used(training, blend)
        for name in datasets_of(data):
            document.wasDerivedFrom(blend, entity("dataset", name, name))
    for span in record.get("trained_by", ()):
        document.wasAssociatedWith(training, _software(document, span["code"]))
        if span["image"]:
            name = image_name(span["image"])
            document.used(training, entity("image", name, name, span["image"]))


def _entity(document: ProvDocument, kind: str, key: str, label: str, details: dict[str, Any] | None = None) -> Any:
    """An entity, added once."""
    name = _name(kind, key)
    known = document.get_record(name)
    return known[0] if known else document.entity(name, _attributes(label, {"kind": kind, **(details or {})}))


def _software(document: ProvDocument, code: dict[str, Any] | None) -> Any:
    """A revision of Stagecoach as an agent, added once."""
    name, kind = _name("code", code_name(code)), document.valid_qualified_name("prov:SoftwareAgent")
    known = document.get_record(name)
    return known[0] if known else document.agent(name, _attributes("Stagecoach", code or {}) | {"prov:type": kind})


def _attributes(label: str, details: dict[str, Any]) -> dict[str, Any]:
    """A label, and the details that are known under the namespace."""
    return {"prov:label": label} | {f"stagecoach:{key}": value for key, value in details.items() if value is not None}


def _name(kind: str, identifier: str) -> str:
    safe = "".join(char if char.isalnum() or char in "-._/@" else "_" for char in identifier)
    return f"stagecoach:{kind}/{safe}"
