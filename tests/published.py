"""A short chain as it lies on disk when it is published: every record by the code that writes it, small made-up weights."""

import json
import shutil
import struct
from pathlib import Path

import pyarrow as pa
from scripts.stage.memo import stage_files

from scripts.data.fill import fill_blend
from scripts.data.source_record import origin_of
from scripts.data.synthesize import write_source
from scripts.evaluate.results import SCHEMA, evaluation_record, write_rollouts
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.stage.attempts import begin_attempt, end_attempt
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.metrics import write_metrics
from scripts.stage.provenance import code_revision, origin_of_checkpoint, parents_of
from scripts.stage.publish import export_checkpoint, publish_checkpoint
from scripts.stage.rundir import newest_checkpoint, open_run_directory, seal_checkpoint
from tests.conftest import SHORT

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
    recipe = load_recipe(SHORT)
    files, config = stage_files(recipe, results, name), resolve_stage(recipe, name)
    facts = stage_facts(config, files.manifest, files.parent_export)
    open_run_directory(files.run, identity_of(facts), facts, config)
    begin_attempt(files.run, 0, code=code_revision())
    saved = files.run / "saving"
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(safetensors(byte))
    (saved / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (saved / "tokenizer.json").write_text("{}")
    (saved / "optimizer.pt").write_bytes(b"moments")
    seal_checkpoint(saved, files.run, STEPS)
    end_attempt(files.run, STEPS, "finished")
    (files.run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "loss": 1.0 / step, "seconds": 1.0, "timing": {"update": 0.75}}) + "\n"
            for step in range(1, STEPS + 1)
        )
    )
    publish(results, name)
    export_checkpoint(results / name / "ckpt", results / name / "hf")
    write_metrics(files.run / "metrics.jsonl", results / name / "metrics.parquet", STEPS)
    rollouts = scored("math", 20, 10, 10 + 2 * byte) + scored("genrm", 10, 5, 5 - byte)
    table = pa.Table.from_pylist(rollouts, schema=SCHEMA)
    write_rollouts(table, results / name / "rollouts.parquet")
    evaluation = evaluation_record(read_json(files.export), table, {"temperature": 0.0})
    write_json(results / name / "eval.json", evaluation)
    write_json(results / name / "gate.json", {"stage": name, "verdict": "warn" if byte else "pass"})


def scored(environment: str, rows: int, before: int, after: int) -> list[dict]:
    """Held-out rows of an environment, so many of them answered rightly before and after."""
    return [
        {"environment": environment, "reward_before": float(row < before), "reward_after": float(row < after)}
        for row in range(rows)
    ]


def publish(results: Path, name: str) -> None:
    """Publish what the stage's run directory holds."""
    recipe = load_recipe(SHORT)
    files = stage_files(recipe, results, name)
    identity = read_json(files.run / "identity.json")["identity"]
    facts = stage_facts(resolve_stage(recipe, name), files.manifest, files.parent_export)
    checkpoint = newest_checkpoint(files.run)
    origin = origin_of_checkpoint(resolve_stage(recipe, name), files.manifest, files.run, checkpoint.step)
    parents = parents_of(files.parent_export)
    publish_checkpoint(checkpoint, results / name / "ckpt", name, identity, facts, parents, origin)


def copy_chain(chain: Path, target: Path) -> Path:
    """A copy of a chain, whose exports share no file with the checkpoints."""
    return shutil.copytree(chain, target, symlinks=True)
