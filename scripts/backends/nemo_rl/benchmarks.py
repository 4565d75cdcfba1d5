"""Benchmarks of an export by NeMo-RL's own run_eval.py, each in a container on one node of the Slurm job around it."""

import argparse
import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.backends.nemo_rl.export import linked_weights
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime, runtime_of
from scripts.backends.nemo_rl.settings import NemoRlEvaluation
from scripts.errors import UserError, run_program
from scripts.evaluate.benchmarks import standard_error, write_benchmarks
from scripts.files import read_json, read_tail
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import Benchmark
from scripts.stage.consistency import exported_model

PROGRAM, CONFIGS = "examples/run_eval.py", "examples/configs/evals"
CONFIG_OF = {  # by how a benchmark's name starts; the first counts
    "aime": "eval.yaml",
    "gpqa": "gpqa_eval.yaml",
    "math": "math_eval.yaml",
    "mmlu_pro": "mmlu_pro.yaml",
    "mmlu": "mmlu.yaml",
}
SCORE = re.compile(r"^score=(\d+\.\d{4}) \([\d.]+/(\d+)\)$")
ROUNDING = 0.5e-4 + 1e-9


def config_of(benchmark: str) -> str:
    """The config of run_eval.py that has the prompt and the verifier for a data set."""
    return next(config for start, config in CONFIG_OF.items() if benchmark.startswith(start))


def arguments_of(benchmark: str, runtime: Runtime, model: Path, results: Path) -> list[str]:
    """What run_eval.py is told: OmegaConf's ``key=value``, whose values are YAML, so JSON quotes them."""
    tensor, gpus = runtime.generator_gpus, runtime.site.slurm.gpus_per_node
    if gpus % tensor:
        raise UserError(
            f"generation.vllm_cfg.tensor_parallel_size is {tensor}, which a node's {gpus} GPUs are no multiple of; "
            "benchmarks run on one node"
        )
    settings = {
        "generation.model_name": str(model),
        "generation.vllm_cfg.tensor_parallel_size": tensor,
        "generation.vllm_cfg.max_model_len": runtime.settings.policy["max_total_sequence_length"],
        "data.dataset_name": benchmark,
        "eval.save_path": str(results),
        "cluster.gpus_per_node": gpus,
        "cluster.num_nodes": 1,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return [PROGRAM, "--config", f"{CONFIGS}/{config_of(benchmark)}", *overrides]


def read_result(results: Path, log: Path) -> dict[str, Any]:
    """Score, samples and settings of a benchmark that ended; UserError where its file and what it printed differ."""
    path = results / "evaluation_data.json"
    rewards = [sample["reward"] for sample in read_json(path)["evaluation_data"]] if path.exists() else []
    printed = [match for line in read_tail(log) if (match := SCORE.match(line.strip()))]
    if not rewards or not printed:
        what = f"{path} holds no sample" if not rewards else f"{log} holds no line score=..."
        raise UserError(f"{what}: run_eval.py did not come to its end; see {log}")
    score, printed_score, samples = fmean(rewards), float(printed[-1][1]), int(printed[-1][2])
    if samples != len(rewards) or abs(score - printed_score) > ROUNDING:
        raise UserError(
            f"{path}: {len(rewards)} samples with a mean of {score:.4f}, but {log} says {printed_score:.4f} of "
            f"{samples}; evaluate again"
        )
    counted = {"score": round(score, 6), "stderr": standard_error(rewards), "samples": samples}
    return {**counted, "settings": read_json(results / "config.json")}


def run_benchmarks(recipe: Recipe, name: str, site: Site, export: Path, folder: Path) -> dict[str, Benchmark]:
    """The scores on all benchmarks that the recipe names, one after another."""
    runtime, model = runtime_of(recipe, name, site), exported_model(export).resolve()
    if linked_weights(model):
        raise UserError(f"{model}: only a link to Megatron's weights; run_eval.py needs Hugging Face's format")
    results = {}
    for benchmark in recipe.evaluation.benchmarks:
        own, log = folder / benchmark, folder / f"{benchmark}.log"
        shutil.rmtree(own, ignore_errors=True)
        log.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{name}: {benchmark}; see {log}", flush=True)
        runtime.run([*runtime.release.python.split(), *arguments_of(benchmark, runtime, model, own)], log)
        results[benchmark] = read_result(own, log)
        print(f"{name}: {benchmark} {results[benchmark]['score']:.4f}", flush=True)
    return results


def main() -> None:
    """Command line of the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.nemo_rl.benchmarks", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True, help="the stage's hf/record.json")
    parser.add_argument("--folder", type=Path, required=True, help="where run_eval.py writes and logs; it stays")
    parser.add_argument("--output", type=Path, required=True, help="benchmarks.json")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if not isinstance(recipe.evaluation, NemoRlEvaluation) or not recipe.evaluation.benchmarks:
        raise UserError(f"{arguments.recipe}: names no benchmarks; list them as evaluation.benchmarks")
    site, folder = load_site(arguments.site, recipe), arguments.folder.absolute()
    scores = run_benchmarks(recipe, arguments.stage, site, arguments.export, folder)
    release = {"name": recipe.release, "revision": release_of(recipe.release).revision}
    write_benchmarks(arguments.export, scores, arguments.output, release=release)


if __name__ == "__main__":
    run_program(main)
