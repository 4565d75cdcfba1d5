"""Quantise a stage's export in the format of compressed-tensors, which vLLM and transformers load.

Weights of linear layers but the output layer are rounded to the nearest, by the largest weight of those with a scale.
"""

from pathlib import Path
from typing import Annotated

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, is_module_quantized

from scripts.errors import UserError
from scripts.files import amount, copy_file, describe_files, temporary_directory, write_json
from scripts.model.form import key_of_type
from scripts.model.hugging_face import INDEX, config_of, model_files
from scripts.model.loading import load_model
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe
from scripts.recipe.stage_settings import Quantize
from scripts.records import ExportRecord, read_record
from scripts.stage.consistency import exported_model
from scripts.stage.publish import publish_export, settle_export, weights_among

NOT_QUANTISED = "The export that is quantised holds them, or weights too large for the scales of the format"
SCHEMES = {"fp8": "FP8_DYNAMIC", "int4": "W4A16", "nvfp4": "NVFP4A16"}


def quantise(folder: Path, settings: Quantize, fresh: Path) -> None:
    """Write the quantised model of a folder into an empty folder; UserError for rows that groups do not divide.

    The format unpacks nvfp4 to bfloat16, so its other weights are of this type, too.
    """
    model = load_model(folder, torch.bfloat16 if settings.format == "nvfp4" else "auto")
    scheme = preset_name_to_scheme(SCHEMES[settings.format], ["Linear"])
    if settings.format == "int4":
        scheme.weights.group_size = settings.group_size
    apply_quantization_config(model, QuantizationConfig(config_groups={"linear": scheme}, ignore=["lm_head"]))
    for name, module in model.named_modules():
        if is_module_quantized(module):
            _scale(name, module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(fresh)
    compressor.update_config(fresh)
    _settle_form(folder, fresh)


def _settle_form(folder: Path, fresh: Path) -> None:
    """Give the quantised weights the model's files as they are, the config with what quantising changes."""
    saved, config = config_of(fresh), config_of(folder)
    config[key_of_type(config)] = saved["dtype"]
    for path in model_files(folder):
        if path.suffix != ".safetensors" and path.name != INDEX:
            copy_file(path, fresh / path.name)
    write_json(fresh / "config.json", config | {"quantization_config": saved["quantization_config"]})


def _scale(name: str, module: torch.nn.Module) -> None:
    """Set the scales of a module's weights: of its rows, or of groups of a row's weights."""
    weights, arguments, of_all = module.weight.data, module.quantization_scheme.weights, None
    width = weights.shape[-1]
    if width % (size := arguments.group_size or width):
        raise UserError(f"quantize: {name} has rows of {width} weights, not a multiple of group_size {size}; lower it")
    shared = weights.unflatten(-1, (-1, size))
    if hasattr(module, "weight_global_scale"):
        of_all = generate_gparam(*weights.aminmax())
        module.weight_global_scale.data.copy_(of_all)
    scales, _ = calculate_qparams(shared.amin(-1), shared.amax(-1), arguments, of_all)
    module.weight_scale.data.copy_(scales)


def main(
    recipe: Path,
    export: Annotated[Path, "hf/record.json of the stage"],
    output: Annotated[Path, "quantized/hf/record.json"],
) -> None:
    """Quantise an export."""
    record, folder = read_record(export, ExportRecord), exported_model(export)
    name = export.parents[1].name
    settings, exports = load_recipe(recipe).graph[name].settings.quantize, folder.resolve().parent
    with temporary_directory(exports / "incoming") as fresh:
        quantise(folder, settings, fresh)
        files = describe_files(fresh)
        settle_export(fresh, exports, files, f"{name}: quantize", NOT_QUANTISED)
    publish_export(record, files, output.parent, exports, quantized=settings.model_dump(mode="json"))
    sizes = (sum(file["bytes"] for file in weights_among(each).values()) for each in (record["files"], files))
    print(f"{name}: {settings.format}, weights of {' -> '.join(map(amount, sizes))}", flush=True)


if __name__ == "__main__":
    run_command_line(main)
