"""Score an export on the recipe's tasks by lm-evaluation-harness: through vLLM where this Python has that.

Every task is kept in the store as soon as it is scored, and what the store has is not scored again. lm-eval's own cache
of responses, which does not tell models apart, is never used.
"""

import argparse
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.errors import UserError, run_program
from scripts.evaluate.benchmarks import beside_parent, keep, path_in, read_kept, write_benchmarks
from scripts.evaluate.tasks import Asked, engine, import_harness, load_tasks
from scripts.files import read_json
from scripts.model.shape import Shape
from scripts.recipe.evaluation import EvaluationBase
from scripts.recipe.load import load_recipe
from scripts.records import Benchmark, Benchmarks, ExportRecord, read_record
from scripts.stage.consistency import MEGATRON, exported_model

CPU_BATCH = 8
THINKING = "enable_thinking"


def open_model(folder: Path, accelerator: str, evaluation: EvaluationBase) -> Any:
    """lm-eval's model of an export, in the type it is saved in: on the GPUs of this node or on the CPU."""
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and not gpus:
        raise UserError(f"the site's accelerator is cuda, but torch {torch.__version__} sees no GPU here")
    variables = dict(evaluation.chat_template_kwargs)
    values = {"pretrained": str(folder), "dtype": "auto", THINKING: variables.pop(THINKING, None)}
    values |= {"chat_template_args": variables}
    if evaluation.max_length:
        values["max_length"] = evaluation.max_length
    if engine() == "vllm":
        values |= {"tensor_parallel_size": parallel_gpus(Shape.of_folder(folder), gpus)}
        more = {"batch_size": "auto"}
    else:
        values |= {"parallelize": gpus > 1}
        more = {"batch_size": "auto" if gpus else CPU_BATCH, "device": "cuda" if gpus else "cpu"}
    return import_module("lm_eval.api.registry").get_model(engine()).create_from_arg_obj(values, more)


def parallel_gpus(shape: Shape, gpus: int) -> int:
    """The most of a node's GPUs over which vLLM can lay a model: its heads must divide by them."""
    return max(number for number in range(1, max(gpus, 1) + 1) if shape.heads % number == 0 == max(gpus, 1) % number)


def score(lm: Any, asked: Asked, evaluation: EvaluationBase) -> tuple[dict[str, Benchmark], list[dict[str, Any]]]:
    """The entries of benchmarks.json that a task, group or tag makes, and their documents."""
    task = asked.task
    with_template = evaluation.apply_chat_template and lm.tokenizer.chat_template is not None
    found = import_module("lm_eval").simple_evaluate(
        model=lm,
        tasks=asked.parts,
        task_manager=asked.manager,
        num_fewshot=task.num_fewshot,
        limit=task.limit,
        gen_kwargs=dict(task.gen_kwargs) or None,
        apply_chat_template=with_template,
        fewshot_as_multiturn=with_template and evaluation.fewshot_as_multiturn,
        use_cache=None,
        cache_requests=False,
        log_samples=True,
    )
    results = found["results"]
    names = [task.task] if _numbers(results.get(task.task, {})) else [*asked.leaves]
    entries, documents = {}, []
    for name in names:
        metric = _metric(asked, name, _numbers(results[name]))
        leaves = asked.leaves if name == task.task else {name: asked.leaves[name]}
        config = next(iter(leaves.values())).config
        entries[name] = {
            **_number(results[name], metric),
            "samples": results[name]["sample_len"],
            "metric": metric,
            "metrics": {each: _number(results[name], each) for each in _numbers(results[name])},
            "num_fewshot": found["n-shot"].get(name, 0),
            "version": str(found["versions"].get(name)),
            "chat_template": with_template,
            "dataset": {"path": str(config.dataset_path), "name": config.dataset_name, "split": config.test_split},
            "key": asked.key,
        }
        documents += [row for leaf in leaves for row in _documents(found["samples"][leaf], name, leaf, metric)]
    return entries, documents


def _numbers(result: dict[str, Any]) -> list[str]:
    """The metrics of a result that are numbers, as lm-eval writes them: metric,filter."""
    return [key for key, value in result.items() if "," in key and "_stderr," not in key and _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.number) and math.isfinite(value)


def _number(result: dict[str, Any], metric: str) -> dict[str, float | None]:
    error = result.get(metric.replace(",", "_stderr,", 1))
    return {"score": round(float(result[metric]), 6), "stderr": round(float(error), 6) if _is_number(error) else None}


def _metric(asked: Asked, name: str, metrics: list[str]) -> str:
    """The metric that counts: the task's first, or the one that the recipe names, with its filter or without."""
    wanted = asked.task.metric
    fitting = [metric for metric in metrics if wanted in (None, metric, metric.split(",")[0])]
    if not fitting:
        raise UserError(f"evaluation.tasks: {name} has no metric {wanted or 'at all'}; it has {', '.join(metrics)}")
    return fitting[0]


def _documents(samples: list[dict[str, Any]], name: str, leaf: str, metric: str) -> Iterator[dict[str, Any]]:
    number, _, answers = metric.partition(",")
    for sample in samples:
        if sample["filter"] == answers:
            value, (response, *_) = sample.get(number), sample["filtered_resps"]
            yield {
                "benchmark": name,
                "task": leaf,
                "document": sample["doc_id"],
                "score": float(value) if isinstance(value, bool | np.bool_) or _is_number(value) else None,
                "prompt": str(sample["arguments"][0][0]),
                "response": response if isinstance(response, str) else str(sample["filtered_resps"]),
            }


def score_missing(
    missing: list[str], keys: dict[str, str], folder: Path, evaluation: EvaluationBase, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Benchmark], list[dict[str, Any]]]]:
    """Score tasks one after another; UserError where one is not what tasks.json says any more."""
    tasks = load_tasks(evaluation, import_harness(arguments.packages))
    if changed := [name for name in missing if tasks[name].key != keys[name]]:
        raise UserError(f"evaluation.tasks: {', '.join(changed)} changed meanwhile; call Snakemake again")
    lm = open_model(folder, arguments.accelerator, evaluation)
    for name in missing:
        yield name, *score(lm, tasks[name], evaluation)


def main() -> None:
    """Command line: benchmarks.json."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate.harness", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True, help="tasks.json")
    parser.add_argument("--export", type=Path, required=True, help="hf/record.json of a stage or of the model")
    parser.add_argument("--parent", type=Path, nargs="?", help="benchmarks.json of what the stage started from")
    parser.add_argument("--packages", type=Path, required=True, help="the folder of envs/lm-eval.txt's packages")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), default="cpu", help="what the model runs on")
    parser.add_argument("--store", type=Path, required=True, help="the folder where scores are kept")
    parser.add_argument("--output", type=Path, required=True, help="benchmarks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    evaluation, asked = load_recipe(arguments.recipe).evaluation, read_json(arguments.tasks)
    folder, record = exported_model(arguments.export), read_record(arguments.export, ExportRecord)
    if (folder / MEGATRON).exists():
        raise UserError(f"{folder}: only a link to Megatron's weights; lm-eval needs Hugging Face's format")
    keys = {name: each["key"] for name, each in asked["tasks"].items()}
    paths = {name: path_in(arguments.store, record["content"], key) for name, key in keys.items()}
    missing = [name for name, path in paths.items() if not path.exists()]
    for name, entries, documents in score_missing(missing, keys, folder, evaluation, arguments) if missing else ():
        keep(paths[name], entries, documents)
        for benchmark, entry in entries.items():
            error = "" if entry["stderr"] is None else f" ± {entry['stderr']:.4f}"
            print(f"{record['stage']}: {benchmark} {entry['score']:.4f}{error} ({entry['metric']})", flush=True)
    scores = {name: entry for path in paths.values() for name, entry in read_kept(path).scores.items()}
    parent = read_record(arguments.parent, Benchmarks) if arguments.parent else None
    scores = beside_parent(scores, record["content"], parent, arguments.store)
    by = {"by": f"lm-eval {asked['harness']}, {asked['engine']}"}
    write_benchmarks(arguments.export, scores, arguments.output, **by)


if __name__ == "__main__":
    run_program(main)
