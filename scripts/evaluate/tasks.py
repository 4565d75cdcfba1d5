"""Score an export on the recipe's tasks by the command line of lm-evaluation-harness, a call a task.

Without an export, fetch the tasks' data sets and check the names, before any node is asked for.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from transformers import AutoTokenizer

from scripts.errors import UserError
from scripts.evaluate.benchmarks import beside_parent, read_scores, share_cut
from scripts.files import canonical_json, replace_directory, scratch_folder, sha256_file, sha256_text, write_json
from scripts.installed import version_of
from scripts.model.bfloat16 import type_to_score
from scripts.model.generation_settings import BY_RECIPE, folder_without_sampling, settings_asked, settings_that_counted
from scripts.model.loading import count_gpus
from scripts.model.shape import Shape
from scripts.processes import PARENT
from scripts.program import run_command_line
from scripts.recipe.evaluation import Evaluation, Task
from scripts.recipe.load import load_recipe
from scripts.recipe.task_files import data_of_task, files_of_task
from scripts.records import Benchmark, Benchmarks, ExportRecord, read_record
from scripts.rows.chat_format import ChatFormat
from scripts.stage.consistency import exported_model

LM_EVAL = (
    "import runpy, sys; from scripts.processes import end_with_parent; end_with_parent();"
    "sys.path.append(sys.argv.pop(1)); runpy.run_module('lm_eval', run_name='__main__')"
)
KEY = 16
CPU_BATCH = 8
THINKING = "enable_thinking"
GIVEN = ("temperature",)
"""Settings of generation_config.json that lm-eval always sets by itself, whatever a task says."""


def key_of(task: Task, evaluation: Evaluation, harness: str, folder: Path | None = None) -> str:
    """Return the key of a question: lm-eval's version, the engine, the task's settings and the files of its folder.

    Local data elsewhere count that the task names. The key also says that nothing else counts where lm-eval, by
    transformers, once followed settings of the model's `folder`.
    """
    settings = ("apply_chat_template", "max_length", "chat_template_kwargs")
    engine = "vllm" if version_of("vllm") else "hf"
    data = [sha256_file(Path(path)) for path in data_of_task(task)]
    was_followed = folder is not None and engine == "hf" and settings_that_counted(folder, GIVEN, is_greedy=False)
    whole = {
        **({"sampled": BY_RECIPE} if was_followed else {}),
        "harness": harness,
        "engine": engine,
        "task": task.model_dump(mode="json", exclude={"include_path", "metric"}),
        "settings": evaluation.model_dump(mode="json", include={*settings}),
        "files": [sha256_file(Path(path)) for path in files_of_task(task)],
        **({"data": data} if data else {}),
    }
    return sha256_text(canonical_json(whole))[:KEY]


def settings_of(task: Task) -> dict[str, Any]:
    """Return the settings of a task in lm-eval's words."""
    given = task.model_dump(mode="json", exclude={"task", "metric"}, exclude_defaults=True)
    return {"tasks": [task.task], "log_samples": True} | given


def settings_of_model(folder: Path, accelerator: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return the settings of a model in lm-eval's words, on this node's GPUs or on the CPU."""
    gpus, variables = count_gpus(accelerator), dict(evaluation.chat_template_kwargs)
    dtype = type_to_score(folder, "cuda" if gpus else "cpu")
    model = {"pretrained": str(folder), "dtype": dtype, THINKING: variables.pop(THINKING, None)}
    model |= {"chat_template_args": variables}
    model |= {"max_length": evaluation.max_length} if evaluation.max_length else {}
    with_template = evaluation.apply_chat_template and ChatFormat.of(folder).chat_template is not None
    settings = {"apply_chat_template": with_template, "fewshot_as_multiturn": with_template}
    if version_of("vllm"):
        heads = Shape.of_folder(folder).heads
        parallel = max(count for count in range(1, max(gpus, 1) + 1) if heads % count == 0 == max(gpus, 1) % count)
        return settings | {
            "model": "vllm",
            "model_args": model | {"tensor_parallel_size": parallel},
            "batch_size": "auto",
        }
    on = {"batch_size": "auto", "device": "cuda"} if gpus else {"batch_size": CPU_BATCH, "device": "cpu"}
    return settings | {"model": "hf", "model_args": model | {"parallelize": gpus > 1}} | on


def run_harness(settings: dict[str, Any], packages: Path, folder: Path) -> None:
    """Call lm-eval, with its output on stderr and its files in a folder; UserError with its last line if it fails."""
    config = folder / "lm-eval.yaml"
    config.write_text(yaml.safe_dump(settings | {"output_path": str(folder)}), encoding="utf-8")
    command, last = [sys.executable, "-c", LM_EVAL, str(packages), "run", "--config", str(config)], ""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | {PARENT: str(os.getpid())}}
    with subprocess.Popen(command, text=True, **told) as process:  # noqa: S603
        for line in process.stdout:
            sys.stderr.write(line)
            last = line.strip() or last
    if process.returncode:
        raise UserError(f"evaluation.tasks: {settings['tasks'][0]}: lm-eval ended with {process.returncode}: {last}")


def _in_words(benchmark: str, entry: Benchmark) -> str:
    """Return a line on a score for the log."""
    cut = f", {entry['cut']:.0%} of the answers cut" if entry["cut"] else ""
    error = "" if entry["stderr"] is None else f" ± {entry['stderr']:.4f}"
    return f"{benchmark} {entry['score']:.4f}{error} ({entry['metric']}){cut}"


def main(
    recipe: Path,
    packages: Annotated[Path, "the folder of envs/lm-eval.txt's packages"],
    output: Annotated[Path, "benchmarks.json; tasks.json without an export"],
    export: Annotated[Path | None, "hf/record.json of a stage or of the model"] = None,
    parent: Annotated[Path | None, "benchmarks.json of the stage's start"] = None,
    threads: int = 2,
    accelerator: Annotated[Literal["auto", "cuda", "cpu"], "device of the model"] = "cpu",
    store: Annotated[Path | None, "the folder where answers are kept"] = None,
) -> None:
    """Write benchmarks.json of an export, or tasks.json."""
    evaluation = load_recipe(recipe).evaluation
    sys.path.append(str(packages))  # last, so that this Python's own packages count
    if (harness := version_of("lm_eval")) is None:
        raise UserError(
            f"{packages}: no lm-eval there, nor in {sys.executable}; delete that folder, and call Snakemake"
        )
    if export is None:
        for task in evaluation.task_list:
            with scratch_folder() as made:
                settings = settings_of(task) | {"model": "dummy", "device": "cpu", "limit": 1}
                run_harness(settings, packages, made)
        write_json(output, {"harness": harness, "tasks": [task.task for task in evaluation.task_list]})
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    folder, record = exported_model(export), read_record(export, ExportRecord)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    scores, unused = {}, settings_asked(folder)
    with folder_without_sampling(folder) as asked:
        model = settings_of_model(asked, accelerator, evaluation)
        for task in evaluation.task_list:
            key = key_of(task, evaluation, harness, folder)
            kept = store / record["content"] / key
            if not kept.exists():
                with replace_directory(kept) as fresh:
                    run_harness(settings_of(task) | model, packages, fresh)
            found = read_scores(kept, task.task, task.metric, key)
            for benchmark, entry in found.items():
                entry["cut"] = share_cut(
                    kept, benchmark, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
                )
                print(f"{record['stage']}: {_in_words(benchmark, entry)}", flush=True)
            scores |= found
    before = read_record(parent, Benchmarks) if parent else None
    known = {name: record[name] for name in ("stage", "step", "content")}
    known |= {"by": f"lm-eval {harness}, {model['model']}", "benchmarks": scores}
    known |= {"not_used": unused} if unused else {}
    write_json(output, known | {"benchmarks": beside_parent(known, before, store)})


if __name__ == "__main__":
    run_command_line(main)
