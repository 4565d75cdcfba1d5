"""Export a checkpoint to Hugging Face's format by the release's converter.

The export is a folder named by content, since NeMo-RL caches imports by path. The converter runs in this process's
Slurm job, with the driver's container, mounts and variables.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.checkpoints import MEGATRON
from scripts.backends.nemo_rl.releases import Release
from scripts.backends.nemo_rl.runtime import Runtime, runtime_of
from scripts.errors import UserError, warn
from scripts.files import describe_files, temporary_directory, write_json
from scripts.model.hugging_face import PATTERNS, check_model, config_of
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import installation
from scripts.records import CheckpointRecord, read_record
from scripts.rows.chat_format import write_template
from scripts.stage.publish import publish_export, settle_export
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder

DCP_CONVERTER = "examples/converters/convert_dcp_to_hf.py"
PICKLED = "pytorch_model.bin"
TO_SAFETENSORS = Path(__file__).with_name("safetensors.py")
MERGE = installation() / "scripts/model/merge.py"
ADAPTER = "policy/weights/model"
"""Where DTensor v2 leaves adapters, in peft's format."""
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
MEGATRON_PYTHON = Path(__file__).with_name("python_with_megatron.sh")


def with_megatron(arguments: list[str]) -> list[str]:
    """Return the container's command for Python with Megatron, which the driver's Python lacks.

    The images prefetch the environment of each Ray actor below NEMO_RL_VENV_DIR; an image without it has uv build one.
    """
    return ["bash", "-c", MEGATRON_PYTHON.read_text(encoding="utf-8"), "python", *arguments]


def converter_command(release: Release, checkpoint: Path, output: Path, gpus: int) -> list[str]:
    """Return the command that converts a checkpoint (``step_N``) to a new folder `output`."""
    config, weights = checkpoint / "config.yaml", checkpoint / MEGATRON
    if not weights.exists():
        dcp = [f"--dcp-ckpt-path={checkpoint / 'policy/weights'}", f"--config={config}", f"--hf-ckpt-path={output}"]
        return with_megatron([DCP_CONVERTER, *dcp])
    program = [release.converter.script, f"--config={config}", f"--megatron-ckpt-path={weights}"]
    program.append(f"--hf-ckpt-path={output}")
    if release.converter.ranks == 1:
        return with_megatron(program)
    ranks = min(release.converter.ranks, gpus)
    # the script torchrun would have the Python of its first line
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--nnodes=1"]
    # training's sizes as far as one node goes; TP is kept, since v0.7.0's converter takes `sequence_parallel` from
    # training, which Megatron refuses without TP
    megatron = _policy(checkpoint)["megatron_cfg"]
    tensor, experts = (math.gcd(megatron.get(f"{kind}_model_parallel_size", 1), ranks) for kind in ("tensor", "expert"))
    return with_megatron([*torchrun, *program, f"--tp={tensor}", "--pp=1", f"--ep={experts}", "--etp=1"])


def trains_adapters(policy: dict[str, Any]) -> bool:
    """Return whether a section `policy` of NeMo-RL trains adapters alone."""
    megatron, dtensor = (policy.get(name) or {} for name in ("megatron_cfg", "dtensor_cfg"))
    dtensor = policy.get("automodel_cfg") or dtensor  # since v0.8.0
    section = megatron.get("peft") if megatron.get("enabled") else dtensor.get("lora_cfg")
    return bool((section or {}).get("enabled"))


def adapter_command(release: Release, checkpoint: Path, output: Path) -> list[str]:
    """Return the command that converts a Megatron checkpoint's adapters to peft's format in a new folder `output`.

    The converter reads the base model too, as imported for the run; the checkpoint names the folder.
    """
    iteration = checkpoint / MEGATRON
    if release.converter.adapters is None:
        raise UserError(f"{iteration}: {release.name} has no converter of Megatron's adapters")
    trained = yaml.safe_load((iteration / "run_config.yaml").read_text(encoding="utf-8"))
    base = Path(trained["checkpoint"]["pretrained_checkpoint"])
    if (base / MEGATRON.name).is_dir():
        base /= MEGATRON.name
    if not (base / "run_config.yaml").is_file():
        raise UserError(f"{base}: is not there: the imported model over which the adapters of {iteration} were trained")
    return with_megatron(
        [
            *(release.converter.adapters, "--adapter-only", f"--base-ckpt={base}", f"--adapter-ckpt={iteration}"),
            *(f"--hf-model-name={_policy(checkpoint)['model_name']}", f"--hf-ckpt-path={output}"),
        ]
    )


def _merge(runtime: Runtime, checkpoint: Path, output: Path, log: Path) -> dict[str, Any]:
    """Write the base model with a checkpoint's adapters merged in; return the report of the merge."""
    adapter, scratch = checkpoint / ADAPTER, output.with_name(f"{output.name}.adapter")
    try:
        if (checkpoint / MEGATRON).exists():
            adapter = scratch
            runtime.run(adapter_command(runtime.release, checkpoint, adapter), log)
        output.mkdir()
        program = ["-c", MERGE.read_text(encoding="utf-8"), _policy(checkpoint)["model_name"], str(adapter)]
        runtime.run(with_megatron([*program, str(output), *PATTERNS]), log)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    merged = output / "merged.json"
    found = json.loads(merged.read_text(encoding="utf-8"))
    merged.unlink()
    return found


def _policy(checkpoint: Path) -> dict[str, Any]:
    return yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8"))["policy"]


def name_head(export: Path) -> None:
    """Say in config.json that the model scores, where the converter of DTensor's checkpoints leaves the start's words.

    NeMo-RL trains a head of one label. Transformers asks for a token of padding to score a batch.
    """
    config = config_of(export)
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    ends = config.get("eos_token_id")
    padding = {"pad_token_id": ends[0] if isinstance(ends, list) else ends} if "pad_token_id" not in config else {}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(export / "config.json", config | {"architectures": names} | labels | padding)


def convert(stage: Stage, site: Site, log: Path) -> None:
    """Convert the published checkpoint; the export gets ``record.json`` and ``model``, a link to the result."""
    runtime, checkpoint = runtime_of(stage.recipe, stage.name, site), (stage.paths.ckpt / "weights").resolve()
    exports = TrainingFolder.behind(stage.paths.weights).exports
    with temporary_directory(exports / "incoming") as folder:
        incoming, made = folder / "model", {}
        if trains_adapters(_policy(checkpoint)):
            made["merged"] = _merge(runtime, checkpoint, incoming, log)
        else:
            runtime.run(converter_command(runtime.release, checkpoint, incoming, site.slurm.gpus_per_node), log)
        if (incoming / PICKLED).exists():
            runtime.run(with_megatron(["-c", TO_SAFETENSORS.read_text(encoding="utf-8"), str(incoming)]), log)
            start = Path(_policy(checkpoint)["model_name"])
            for path in [*start.glob("*.py"), *start.glob("generation_config.json")]:  # left out by DTensor's converter
                if not (incoming / path.name).exists():
                    shutil.copyfile(path, incoming / path.name)
        if stage.config.loop.makes_head:
            name_head(incoming)
        model = stage.parent_export.absolute() if stage.parent_export else Path(stage.recipe.model.name)
        check_model(incoming, like=model if model.is_absolute() else None)
        if (text := template_text(stage.config.chat_template)) is not None:
            write_template(incoming, text)
        files = describe_files(incoming)
        record = read_record(stage.paths.record, CheckpointRecord)
        settle_export(incoming, exports, files, f"{stage.name}: step {record['step']}")
    publish_export(record, files, stage.paths.export_record.parent, exports, **made)


def template_text(named: str | None) -> str | None:
    """Return the text of a chat template, named by path or text; None without one, or where the file is not here."""
    if named is None or not named.endswith(".jinja"):
        return named
    try:
        return Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        warn(f"policy.tokenizer.chat_template: {named}: cannot be read here ({error})")
        return None
