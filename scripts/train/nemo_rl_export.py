"""Export a checkpoint of NeMo-RL: by the release's own converter to Hugging Face's format, or as it is.

The export is a folder named by its content, since NeMo-RL caches what it imports under the folder's path. The converter
runs in the stage's container, in the Slurm job around this process, and writes to a fresh name.
"""

import argparse
import os
import secrets
import shutil
from pathlib import Path

import yaml

from scripts.errors import UserError, run_program
from scripts.files import canonical_json, describe_files, read_json, replace_directory, sha256_text
from scripts.launch.containers import run_in_container
from scripts.launch.nemo_rl_command import image_of
from scripts.recipe.load import check_stage_name, load_recipe, load_site
from scripts.recipe.models import Recipe
from scripts.recipe.releases import Release, release_of
from scripts.recipe.site import Site
from scripts.train.hugging_face import check_model
from scripts.train.nemo_rl_checkpoints import MEGATRON
from scripts.train.publish import publish_export

DCP_CONVERTER = "examples/converters/convert_dcp_to_hf.py"
LINK = "megatron"


def converter_command(release: Release, checkpoint: Path, output: Path) -> list[str]:
    """The command that writes a checkpoint (a ``step_N`` folder) to `output`, which must not exist yet."""
    config, weights = checkpoint / "config.yaml", checkpoint / MEGATRON
    if not weights.exists():
        program = [*release.python.split(), DCP_CONVERTER, f"--dcp-ckpt-path={checkpoint / 'policy/weights'}"]
        return [*program, f"--config={config}", f"--hf-ckpt-path={output}"]
    script, ranks = release.converter.script, release.converter.ranks
    arguments = [f"--config={config}", f"--megatron-ckpt-path={weights}", f"--hf-ckpt-path={output}"]
    if ranks == 1:
        return [*release.python.split(), script, *arguments]
    return ["torchrun", f"--nproc_per_node={ranks}", script, *arguments, *_split(config, ranks)]


def _split(config: Path, ranks: int) -> list[str]:
    """How the converter shares a model out over its ranks: experts over as many as divide what training used."""
    megatron = yaml.safe_load(config.read_text(encoding="utf-8"))["policy"]["megatron_cfg"]
    experts = max(size for size in (1, 2, 4, 8) if megatron.get("expert_model_parallel_size", 1) % size == 0)
    return ["--tp=1", "--pp=1", f"--ep={min(experts, ranks)}", "--etp=1"]


def convert(recipe: Recipe, stage: str, site: Site, ckpt: Path, hf: Path, log: Path) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to the converted model beside it."""
    release, weights = release_of(recipe.release), (ckpt / "weights").resolve()
    checkout = Path(site.nemo_rl.checkouts[recipe.release])
    incoming = hf.absolute().parent / "exports" / f".incoming.{secrets.token_hex(4)}"
    incoming.parent.mkdir(exist_ok=True)
    try:
        run_in_container(
            converter_command(release, weights, incoming),
            image_of(recipe.stages[stage].image, release, site.nemo_rl),
            [*site.mounts, f"{checkout}:{checkout}"],
            checkout,
            {"PYTHONPATH": str(checkout), "NRL_IGNORE_VERSION_MISMATCH": "1"},
            site.slurm.gpus_per_node if release.converter.ranks > 1 else 0,
            log,
        )
        model = Path(recipe.model.name)
        check_model(incoming, like=model if model.is_absolute() else None)
        files = describe_files(incoming)
        target = incoming.parent / sha256_text(canonical_json(files))[:16]
        if target.exists():
            shutil.rmtree(incoming)
        else:
            incoming.rename(target)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    publish_export(read_json(ckpt / "record.json"), target.name, files, hf)


def handed_on(model: Path) -> dict[str, str] | None:
    """Where the weights are that an export merely links to, and their format; None: the export holds its own."""
    weights = model / LINK
    return {"path": str(weights.resolve()), "format": "megatron_bridge"} if weights.exists() else None


def link(recipe: Recipe, ckpt: Path, hf: Path) -> None:
    """Make `hf` stand for the checkpoint as it is: config and tokenizer of the recipe's model, a link to the weights.

    NeMo-RL takes the weights from there (checkpointing.pretrained_checkpoint), and all else from the folder.
    """
    record, model = read_json(ckpt / "record.json"), Path(recipe.model.name)
    if not (model / "config.json").is_file():
        raise UserError(
            f"{model}: no config.json there; with pretrained_checkpoint the recipe's model must be a folder"
        )
    files = record["files"]
    content = sha256_text(canonical_json(files))[:16]
    with replace_directory(hf.parent / "exports" / content) as fresh:
        for path in sorted(model.iterdir()):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, fresh / path.name)
        weights = (ckpt / "weights").resolve() / "policy/weights"
        (fresh / LINK).symlink_to(os.path.relpath(weights, (hf.parent / "exports" / content).absolute()))
    publish_export(record, content, files, hf)


def main() -> None:
    """Command line of the export."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.nemo_rl_export", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path, required=True, help="the stage's published checkpoint")
    parser.add_argument("--hf", type=Path, required=True, help="directory to publish")
    parser.add_argument("--log", type=Path, required=True, help="what the converter prints")
    parser.add_argument("--as-it-is", action="store_true", help="do not convert: the next stage takes Megatron weights")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    check_stage_name(recipe, arguments.stage, f"{arguments.recipe}: ")
    if arguments.as_it_is:
        link(recipe, arguments.ckpt, arguments.hf)
    else:
        site = load_site(arguments.site, recipe)
        convert(recipe, arguments.stage, site, arguments.ckpt, arguments.hf, arguments.log.absolute())


if __name__ == "__main__":
    run_program(main)
