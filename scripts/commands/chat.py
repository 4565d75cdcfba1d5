"""Chat with a stage's export, by the chat template and the stop tokens of the stage."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from scripts.commands.project import Project, project_of, snakemake_command
from scripts.errors import UserError
from scripts.recipe.load import check_stage_name
from scripts.recipe.sampling import LEAST_TEMPERATURE, is_temperature
from scripts.rows.chat_format import pin_date
from scripts.rows.thoughts import split_response
from scripts.stage.paths import StagePaths

HINT = "empty line: a new conversation; Ctrl-D: the end"
LENGTH = 256
MOST_TOKENS = 1_000_000


def run(arguments: argparse.Namespace) -> None:
    """Answer each line of the standard input, the conversation so far included."""
    project = project_of(arguments)
    check_stage_name(project.recipe, arguments.stage)
    record = StagePaths(project.results / arguments.stage).export_record
    if not record.exists():
        raise UserError(f"stage {arguments.stage} has no export yet: {snakemake_command(record, arguments)}")
    _check_options(arguments.temperature, arguments.max_new_tokens)
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    from scripts.evaluate.score import load_export  # noqa: PLC0415
    from scripts.model.generate import AnswerStreamer, Sampler  # noqa: PLC0415

    disable_progress_bar()
    pin_date(project.recipe.model.template_date)
    told = project.recipe.model.thoughts
    sampler = Sampler(*load_export(record, "auto"), **_decoding(project, arguments), told=told)
    system = _readable(arguments.system or "")
    opening = [{"role": "system", "content": system}] if system else []
    messages = [*opening]
    for line in _lines():
        if not line:
            messages = [*opening]
            continue
        messages.append({"role": "user", "content": line})
        row = {"responses_create_params": {"input": messages}}
        (prompt,) = sampler.render([row])
        streamer = AnswerStreamer(sampler.tokenizer, sampler.reader, prompt)
        inputs = sampler.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        inputs = {key: value.to(sampler.model.device) for key, value in inputs.items() if key != "token_type_ids"}
        output = sampler.model.generate(**inputs, generation_config=sampler.settings, streamer=streamer)
        response = output[0, inputs["input_ids"].shape[1] :].tolist()
        if response[-1] not in sampler.ends:
            print(f"(cut after {len(response)} tokens; more by --max-new-tokens)", file=sys.stderr)
        parted = split_response(sampler.reader.read(prompt, response), told)
        if parted.is_unfinished:
            print("(the thoughts do not end; more by --max-new-tokens)", file=sys.stderr)
        messages.append({"role": "assistant", "content": parted.answer.strip() if parted.thoughts else parted.answer})


def _check_options(temperature: float | None, max_new_tokens: int | None) -> None:
    """Refuse options without a meaning; None: the option is not given."""
    if temperature is not None and not is_temperature(temperature):
        raise UserError(f"--temperature is 0 (greedy), or from {LEAST_TEMPERATURE:g} on, not {temperature:g}")
    if max_new_tokens is not None and not 1 <= max_new_tokens <= MOST_TOKENS:
        raise UserError(f"--max-new-tokens is from 1 to {MOST_TOKENS:,}, not {max_new_tokens}")


def _readable(text: str) -> str:
    """Return a word of the command line with a replacement sign in place of bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _decoding(project: Project, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the Sampler's settings: the stage's, over them those of held-out scores, over them the options."""
    policy = getattr(project.recipe.graph[arguments.stage].settings, "policy", None)
    asked = {"temperature": 0.0, "chat_template_kwargs": policy.tokenizer.chat_template_kwargs if policy else {}}
    asked["stop_token_ids"] = policy.generation.stop_token_ids if hasattr(policy, "generation") else []
    if project.recipe.evaluation is not None:
        asked |= project.recipe.evaluation.decoding
    given = {"temperature": arguments.temperature, "max_new_tokens": arguments.max_new_tokens}
    asked |= {name: value for name, value in given.items() if value is not None}
    asked.pop("max_tool_calling_iterations", None)
    return asked | {"seed": 0, "max_new_tokens": asked.get("max_new_tokens") or LENGTH}


def _lines() -> Iterator[str]:
    """Yield the lines of the standard input; a terminal gets a prompt, and keys to edit a line.

    Bytes that are no UTF-8 become replacement signs.
    """
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if is_terminal := sys.stdin.isatty():
        import readline  # noqa: F401, PLC0415

        print(HINT)
    with suppress(EOFError):
        while True:
            yield input("> " if is_terminal else "").strip()
