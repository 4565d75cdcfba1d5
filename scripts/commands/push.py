"""Push a published stage's export with its model card to a model repository of the Hugging Face hub."""

import argparse
import os
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars

from scripts.data.hub import TOKEN, brief, status_of
from scripts.errors import UserError
from scripts.model.hugging_face import check_model
from scripts.records import ExportRecord, File, read_if_there
from scripts.report.card import model_card
from scripts.report.chain import Link, read_chain
from scripts.report.verify import verify_export
from scripts.stage.publish import code_among

CARD = "README.md"
REFUSALS = (400, 401, 403, 404, 409)


def verified_link(hf: Path, with_code: bool = False) -> Link:
    """Return the stage of an export whose every file is as recorded and that is a whole model; else UserError.

    UserError for a model's own code unless `with_code`: whoever loads the model runs the code.
    """
    link = read_chain(hf)[-1]
    if link.exported is None:
        read_if_there(link.paths.export_record, ExportRecord)  # a damaged record is told of
        raise UserError(f"{hf}: no export of the published checkpoint; snakemake {link.paths.directory}/hf")
    if found := verify_export(link).problems:
        raise UserError("\n".join([f"{hf}: not pushed, files differ from the record:", *found]))
    check_model(link.paths.export)
    if (code := code_among(link.exported["files"])) and not with_code:
        raise UserError(
            f"{hf}: holds the model's own code ({', '.join(code)}), which came with the base model and was never run "
            "here; read it, then push with --with-code"
        )
    return link


def push(link: Link, repository: str, card: str, is_public: bool = False) -> str:
    """Push a verified stage's export and its card; return the page of the new commit."""
    if not get_token():
        raise UserError("no token: export HF_TOKEN with write access, or run hf auth login")
    exported, model = link.exported, link.paths.export
    files = [_addition(model, name, described) for name, described in exported["files"].items() if name != CARD]
    operations = [*files, CommitOperationAdd(CARD, card.encode())]
    message = f"{link.name}, step {link.record['step']}, identity {link.record['identity']}, {exported['content']}"
    try:
        api = HfApi()
        api.create_repo(repository, private=not is_public, exist_ok=True)
        return api.create_commit(repository, operations, commit_message=message).commit_url
    except (httpx2.HTTPError, OfflineModeIsEnabled, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        says = f"{brief(cause)}; run it again: files that came are not sent twice"
        if isinstance(cause, HfHubHTTPError) and status_of(cause) in REFUSALS:
            reason = cause.server_message or "without a reason"
            says = f"the hub refuses it ({status_of(cause)}: {reason}); may {TOKEN} write there?"
        raise UserError(f"{repository} at {constants.ENDPOINT}: {says}") from None


def _addition(model: Path, name: str, described: File) -> CommitOperationAdd:
    """Return the operation that adds a file; UserError for other bytes than recorded, which somebody put there since.

    The client reads the file for the hash that the hub asks for.
    """
    addition = CommitOperationAdd(name, str(model / name))
    sent = addition.upload_info
    if (sent.size, sent.sha256.hex()) != (described["bytes"], described["sha256"]):
        raise UserError(f"{model / name}: has changed since the export was verified, so nothing is pushed; push again")
    return addition


def run(arguments: argparse.Namespace) -> None:
    """Verify, then push; print the page of the new commit."""
    if not os.isatty(2):
        disable_progress_bars()
    if arguments.card and arguments.license:
        raise UserError("--license is for the generated card; write the licence into the file of --card")
    link, card = verified_link(arguments.export, arguments.with_code), arguments.card
    if card:
        text = card.read_text(encoding="utf-8")
    else:  # with what the run's last call knew of the recipe
        facts = read_if_there(link.paths.directory.parent / "settings/card.json", dict[str, str | None]) or {}
        told = arguments.license or facts.get("license"), facts.get("base_model"), facts.get("attribution")
        text = str(model_card(link.paths.directory / "hf", *told))
    print(push(link, arguments.repository, text, arguments.public))
