"""A short chain as it lies on disk when it is published: every record by the code that writes it, small made-up weights."""

import json
import shutil
import struct
from pathlib import Path

import pyarrow as pa

from demo.synthesize import write_source
from scripts.data.fill import fill_blend
from scripts.data.source_record import origin_of
from scripts.evaluate.results import evaluation_record
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.stage.provenance import code_revision, record_of
from scripts.stage.publish import export_checkpoint, publish_checkpoint
from scripts.stage.stage import Stage
from scripts.stage.tables import ROLLOUTS, write_metrics, write_table
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import SHORT
from tests.stages import open_folder

STEPS = 3
SHAPE = [8, 40]


def safetensors(byte: int) -> bytes:
    """A file of one tensor, F32, all of whose bytes are the same."""
    size = 4 * SHAPE[0] * SHAPE[1]
    header = json.dumps({"embed.weight": {"dtype": "F32", "shape": SHAPE, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([byte]) * size


def make_chain(results: Path, *stages: str) -> Path:
    """Data and stages of the short recipe below `results`; that folder."""
    recipe = load_recipe(SHORT)
    source = results / "data/source"
    write_source(recipe, source)
    record = read_json(source / "record.json")
    for name in dict.fromkeys(recipe.stages[stage].blend for stage in stages):
        folder, blend = results / "data" / name, recipe.blends[name]
        described = fill_blend(source / f"{name}.jsonl", source / "tables", folder, blend.holdout)
        write_json(folder / "manifest.json", {"blend": name, "source": origin_of(record, name), **described})
    for place, stage in enumerate(stages):
        make_stage(results, stage, byte=place)
    return results


def make_stage(results: Path, name: str, byte: int) -> None:
    """A trained, published, exported and scored stage."""
    stage = Stage(load_recipe(SHORT), results, name)
    run, paths = open_folder(stage), stage.paths
    TrainingFolder(run).begin_attempt(0, code=code_revision())
    saved = run / "saving"
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(safetensors(byte))
    (saved / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (saved / "tokenizer.json").write_text("{}")
    (saved / "optimizer.pt").write_bytes(b"moments")
    TrainingFolder(run).seal(saved, STEPS)
    TrainingFolder(run).end_attempt(STEPS, "finished")
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "loss": 1.0 / step, "seconds": 1.0, "timing": {"update": 0.75}}) + "\n"
            for step in range(1, STEPS + 1)
        )
    )
    publish(results, name)
    export_checkpoint(paths.ckpt, paths.directory / "hf")
    write_metrics(run / "metrics.jsonl", paths.metrics, STEPS)
    rollouts = scored("math", 20, 10, 10 + 2 * byte) + scored("genrm", 10, 5, 5 - byte)
    table = pa.Table.from_pylist(rollouts, schema=ROLLOUTS)
    write_table(table, paths.rollouts)
    evaluation = evaluation_record(read_json(paths.export_record), table, {"temperature": 0.0})
    write_json(paths.evaluation, evaluation)
    write_json(paths.gate, {"stage": name, "verdict": "warn" if byte else "pass"})


def scored(environment: str, rows: int, before: int, after: int) -> list[dict]:
    """Held-out rows of an environment, so many of them answered rightly before and after."""
    return [
        {
            "environment": environment,
            "split": "rows",
            "reward_before": float(row < before),
            "reward_after": float(row < after),
        }
        for row in range(rows)
    ]


def publish(results: Path, name: str) -> None:
    """Publish what the stage's run directory holds."""
    stage = Stage(load_recipe(SHORT), results, name)
    checkpoint, identity = TrainingFolder(stage.paths.run).newest_checkpoint(), TrainingFolder(stage.paths.run).identity
    publish_checkpoint(checkpoint, stage.paths.ckpt, record_of(stage, checkpoint.step) | {"identity": identity})


def copy_chain(chain: Path, target: Path) -> Path:
    """A copy of a chain, whose exports share no file with the checkpoints."""
    return shutil.copytree(chain, target, symlinks=True)
