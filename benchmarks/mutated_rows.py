"""Damaged rows of every shape: each is refused with its place, or tokenized as the chat template alone says.

    python benchmarks/mutated_rows.py --rows 10000 > benchmarks/mutated_rows.md

A row of each shape that a blend can have is made by a seed and damaged once or several times: fields that are missing,
empty, of a wrong type or very long, roles out of order, control characters, special tokens within texts, JSON within
JSON, keys twice, bytes that are no JSON. It goes the way of all rows: the check of its blend, then the tokens of its
stage, for each of several chat templates that TRL ships. What is trained on is held against the tokenizer's own
``apply_chat_template`` of messages that are made here from the row, and what is learnt against the answer.
"""

import copy
import json
import random
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head
from benchmarks.common import row as row_of
from benchmarks.mutations import COMPOSED, SHAPES, Row, rows_of
from scripts.backends.trl.tokenization import Line, render_prompts, tokenize_answers, tokenize_demonstrations
from scripts.data.check import Rules, check_files
from scripts.data.compose import write_blend
from scripts.data.published import PublishedFile
from scripts.errors import UserError
from scripts.model.processor import make_processor
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.load import load_recipe
from scripts.rows.jsonl import decode_row
from scripts.rows.kinds import KINDS
from scripts.rows.prompts import open_picture
from tests.pretrained import tokenizer

TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "gemma3", "nemotron_3_nano")
OUTCOMES = {
    "by the check": "refused while composed or checked, with file, line and field",
    "by the tokens": "refused with its place when tokenized",
    "trained": "trained as the template says",
    "failed": "anything else",
}
LONGEST = 1 << 20


@cache
def tokenizer_with(template: str) -> Any:
    """A small tokenizer with a chat template that TRL ships."""
    return tokenizer(chat_template=(files("trl") / "chat_templates" / f"{template}.jinja").read_text())


@cache
def processor_that_sees() -> Any:
    """The processor of a model from scratch that has vision."""
    return make_processor(load_recipe(ROOT / "config/recipes/tiny-omni.yaml").model)


def pictures_of(messages: list[Row]) -> list[Row]:
    """The parts of messages that show a picture."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for content in contents for part in content if part["type"] == "input_image"]


def plain(messages: str | list[Row], role: str = "user") -> list[Row]:
    """Messages as the documentation of chat templates has them, from a row's field."""
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    messages = copy.deepcopy(messages)
    for message in messages:
        if pictures_of([message]):
            message["content"] = [
                {"type": "image"} if part["type"] == "input_image" else {"type": "text", "text": part["text"]}
                for part in message["content"]
            ]
        elif isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or ():
            if isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return messages


def meant_by_columns(row: Row, kind: str) -> Row:
    """The row of a blend that published columns are meant to be."""

    def messages(name: str, role: str) -> list[Row]:
        value = row[name]
        if not isinstance(value, list):
            return [{"role": role, "content": str(value)}]
        names = {"human": "user", "gpt": "assistant"}
        return [
            {"role": names.get(each["from"], each["from"]), "content": each["value"]} if "from" in each else each
            for each in value
        ]

    given = row.get("tools") or []
    given = (json.loads(given) if isinstance(given, str) else given) or []
    tools = [each if "function" in each else {"type": "function", "function": each} for each in given]
    if "conversations" in row or "messages" in row:
        return {"messages": messages("conversations" if "conversations" in row else "messages", "user"), "tools": tools}
    if kind == "preferences":
        fields = {name: messages(name, "assistant") for name in ("chosen", "rejected")}
        return (
            fields
            | ({"prompt": messages("prompt", "user")} if row.get("prompt") is not None else {})
            | {"tools": tools}
        )
    asked, answered = ("prompt", "completion") if "prompt" in row else ("question", "answer")
    if kind == "prompts":
        flat = [{"strict": False} | each["function"] | {"type": "function"} for each in tools]
        return {"responses_create_params": {"input": messages(asked, "user"), "tools": flat}}
    return {"messages": [*messages(asked, "user"), *messages(answered, "assistant")], "tools": tools}


def without_type(tool: Row) -> Row:
    """A tool of Gym's as the function of a chat template's tool."""
    return {key: value for key, value in tool.items() if key != "type"}


def meant(row: Row, kind: str) -> tuple[list[Row], list[list[Row]]]:
    """The messages of a row's prompt, and those of each answer, the better first."""
    if kind == "demonstrations":
        return plain(row["messages"][:-1]), [plain(row["messages"][-1:])]
    if kind == "prompts":
        return plain(row["responses_create_params"]["input"]), []
    if "completions" in row:
        answers = sorted(row["completions"], key=lambda answer: answer["rank"])
        return plain(row["context"]), [plain(answer["completion"]) for answer in answers]
    chosen, rejected = (plain(row[name], "assistant") for name in ("chosen", "rejected"))
    if chosen[0]["role"] == "assistant":
        return plain(row["prompt"]), [chosen, rejected]
    same = next(place for place in range(len(chosen)) if chosen[place] != rejected[place])
    return chosen[:same], [chosen[same:], rejected[same:]]


def differs(row: Row, kind: str, template: str, published: Row | None = None) -> str | None:
    """How what is trained on differs from what the chat template says of a row; None: it does not, or was refused.

    `published` are the columns that it was made of. UserError: the row is refused with its place.
    """
    if pictures_of(row["messages"] if kind == "demonstrations" else []):
        return differs_with_pictures(row)
    made = tokenizer_with(template)
    line = [Line(1, "rows.jsonl:1", json.dumps(row), row)]
    source = row if published is None else meant_by_columns(published, kind)
    prompt, answers = meant(source, kind)
    holder = source["responses_create_params"] if kind == "prompts" else source
    given = holder.get("tools") or []
    tools = [each if "function" in each else {"type": "function", "function": without_type(each)} for each in given]
    options = {"tools": tools or None, "tokenize": True, "return_dict": False}
    if kind == "prompts":
        (rendered,) = render_prompts(line, made, LONGEST, None, {})
        wanted = made.apply_chat_template(prompt, add_generation_prompt=True, **options)
        ids = made(rendered["prompt"], add_special_tokens=False)["input_ids"]
        return None if ids == wanted else "the prompt's tokens"
    made_of = tokenize_demonstrations if kind == "demonstrations" else tokenize_answers
    (tokens,) = made_of(line, made, LONGEST, {})
    as_text = options | {"tokenize": False}
    texts = [made.apply_chat_template([*prompt, *answer], **as_text) for answer in answers]
    if kind == "preferences":
        found = [made.decode(tokens["prompt_ids"] + tokens[name]) for name in ("chosen_ids", "rejected_ids")]
        return None if found == texts else "the tokens of prompt and answers"
    learnt = [label for label in tokens["labels"] if label != -100]
    if tokens["input_ids"] != (wanted := made.apply_chat_template([*prompt, *answers[0]], **options)):
        return "the conversation's tokens"
    if tokens["labels"] != [-100] * (len(wanted) - len(learnt)) + wanted[len(wanted) - len(learnt) :]:
        return "the labels are not the conversation's end"
    asked = made.apply_chat_template(prompt, add_generation_prompt=True, **as_text)
    return None if texts[0] == asked + made.decode(learnt) else "what is learnt"


def differs_with_pictures(row: Row) -> str | None:
    """The same of a demonstration that shows pictures: what the model's own processor makes of texts and pictures."""
    processor, (prompt, (answer,)) = processor_that_sees(), meant(row, "demonstrations")
    (tokens,) = tokenize_demonstrations([Line(1, "rows.jsonl:1", json.dumps(row), row)], processor, LONGEST, {})
    images = [open_picture(part["image_url"]) for part in pictures_of(row["messages"])]
    text = processor.apply_chat_template([*prompt, *answer], tokenize=False)
    asked = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    wanted, before = (processor(text=[each], images=images)["input_ids"][0] for each in (text, asked))
    if tokens["input_ids"] != list(wanted):
        return "the conversation's tokens with pictures"
    return None if tokens["labels"] == [-100] * len(before) + list(wanted[len(before) :]) else "what is learnt"


def problem_in_check(line: bytes, kind: str, folder: Path) -> str | None:
    """What the check of a blend says of a row; None: nothing."""
    file = folder / "rows.jsonl"
    file.write_bytes(line + b"\n")
    try:
        check_files([file], Rules(KINDS[kind]), 1)
    except UserError as error:
        return str(error)
    return None


def composed(line: bytes, kind: str, said: Row, folder: Path) -> bytes:
    """The row that a published row becomes; UserError where it does not fit."""
    file, blend = folder / "rows.jsonl", folder / "blend.jsonl"
    file.write_bytes(line + b"\n")
    settings = PublishedBlend.model_validate({"kind": kind, "file": ["rows.jsonl"], **said})
    write_blend(settings, [[[PublishedFile(file, "rows.jsonl")]]], blend)
    return blend.read_bytes().removesuffix(b"\n")


def outcomes(count: int, seed: int) -> Iterator[tuple[str, str, str, bytes]]:
    """Shape, outcome, what is said of it, and line of so many damaged rows; a failure's outcome is `failed`."""
    templates = random.Random(seed)
    with TemporaryDirectory() as folder:
        for shape, kind, line in rows_of(count, seed):
            row, published = line, None
            try:
                if shape in COMPOSED:
                    try:
                        row = composed(line, kind, COMPOSED[shape], Path(folder))
                    except UserError as error:
                        says = str(error).splitlines()[-1]
                        has_place = "rows.jsonl:1: " in says or "of 0 read" in says
                        yield shape, "by the check" if has_place else "failed", says, line
                        continue
                    published = decode_row(line.removeprefix(BOM_UTF8).removesuffix(b"\r"))
                problem = problem_in_check(row, kind, Path(folder))
                if problem is not None:
                    outcome = "by the check" if "rows.jsonl:1 " in problem else "failed"
                    yield shape, outcome, problem.splitlines()[2] if outcome != "failed" else problem, line
                    continue
                template = templates.choice(TEMPLATES)
                difference = differs(decode_row(row), kind, template, published)
                yield shape, "failed" if difference else "trained", f"{template}: {difference}", line
            except UserError as error:
                place = str(error).startswith("rows.jsonl:1:")
                yield shape, "by the tokens" if place else "failed", str(error), line
            except Exception as error:  # whatever it is, it is what is looked for
                yield shape, "failed", f"{type(error).__name__}: {error}", line


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rows = len(SHAPES)
    counts: dict[str, Counter[str]] = {shape: Counter() for shape in SHAPES}
    for shape, outcome, says, line in outcomes(arguments.rows, arguments.seed):
        counts[shape][outcome] += 1
        if outcome == "failed":
            print(f"{shape}: {says}\n  {line[:600]!r}", file=sys.stderr)
    print(
        f"The fate of {arguments.rows:,} damaged rows, seed {arguments.seed}. Made by "
        f"`python benchmarks/mutated_rows.py --rows {arguments.rows}`; the\nprogram describes the damages. Templates: "
        f"{', '.join(TEMPLATES)}, as TRL ships them.\n\n" + head("shape", "rows", *OUTCOMES.values())
    )
    counts["all"] = sum(counts.values(), Counter())
    for shape, found in counts.items():
        print(row_of(shape, *(f"{count:,}" for count in (found.total(), *(found[name] for name in OUTCOMES)))))
    sys.exit(bool(counts["all"]["failed"]))


if __name__ == "__main__":
    main()
