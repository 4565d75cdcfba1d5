"""Which texts of which forms of rows TRL's chat templates print: the check's findings, beside a plain search.

    python benchmarks/arrival.py > benchmarks/arrival.md

Every text of a row is a word of its own. The search counts these words in what transformers renders, and knows nothing
of the check: where a word is missing, the check has to name a text that is lost. `--backend nemo_rl` reads rows as
NeMo-RL does.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, head, row
from scripts.model.processor import make_tokenizer, pin_clock
from scripts.rows.arrival import Reading, RowCheck
from scripts.rows.chat_format import SHIPPED
from scripts.rows.prompts import as_chat

WORD = re.compile(r"(?<![a-z])[a-z]x[a-z]+")
"""Every text below is made of such words, of which each stands for itself."""
REFUSED = "refused"
FIRST = ("gemma", "gemma3", "glm4moe", "gptoss", "llama3", "llama3_1", "llama3_2", "phi3", "qwen2_5", "qwen3")
Row = dict[str, Any]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A call of a tool."""
    return {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}


def tool(name: str, parameter: str, **more: Any) -> dict[str, Any]:
    """A tool with one parameter."""
    described = {"type": "string", "description": f"{parameter}xabout"} | more
    parameters = {"type": "object", "properties": {parameter: described}}
    return {"type": "function", "function": {"name": name, "description": f"{name}xhelps", "parameters": parameters}}


ASKED, ANSWER = said("user", "uxone question"), said("assistant", "axone answer")
AGAIN = [said("user", "uxtwo question"), said("assistant", "axtwo answer")]
WEATHER, SEARCH = tool("wxquery", "pxcity"), tool("wxsearch", "pxwords", enum=["exone", "extwo"])
CALL, OTHER = call("wxquery", pxcity="vxtown"), call("wxsearch", pxwords="exone")
THOUGHT = said("assistant", "<think>\nrxfirst thought\n</think>\n\naxone answer")
FORMS: dict[str, Row] = {
    "plain": {"messages": [ASKED, ANSWER]},
    "system": {"messages": [said("system", "sxone rule"), ASKED, ANSWER]},
    "system in the middle": {"messages": [ASKED, ANSWER, said("system", "sxtwo rule"), *AGAIN]},
    "developer": {"messages": [said("developer", "dxone rule"), ASKED, ANSWER]},
    "a call": {"tools": [WEATHER], "messages": [ASKED, said("assistant", None, tool_calls=[CALL])]},
    "text and a call": {
        "tools": [WEATHER],
        "messages": [ASKED, said("assistant", "axlet me look", tool_calls=[CALL])],
    },
    "parallel calls": {
        "tools": [WEATHER, SEARCH],
        "messages": [ASKED, said("assistant", "", tool_calls=[CALL, OTHER])],
    },
    "tool answer": {
        "tools": [WEATHER],
        "messages": [
            ASKED,
            said("assistant", "", tool_calls=[CALL]),
            said("tool", "txnine degrees", tool_call_id="abcdefghi"),
            ANSWER,
        ],
    },
    "reasoning": {"messages": [ASKED, ANSWER | {"reasoning_content": "rxfirst thought"}]},
    "thought in the text": {"messages": [ASKED, THOUGHT]},
    "earlier reasoning": {
        "messages": [
            ASKED,
            ANSWER | {"reasoning_content": "rxfirst thought"},
            AGAIN[0],
            AGAIN[1] | {"reasoning_content": "rxsecond thought"},
        ]
    },
    "earlier thought": {"messages": [ASKED, THOUGHT, *AGAIN]},
    "name": {"messages": [ASKED | {"name": "nxalice"}, ANSWER]},
    "parts": {
        "messages": [
            said("user", [{"type": "text", "text": "uxone question"}, {"type": "text", "text": " uxtwo part"}]),
            ANSWER,
        ]
    },
}


def words_of(value: Any) -> Iterator[str]:
    """Yield the words of a row, but for roles and other keys that are no text of it."""
    if isinstance(value, str):
        yield from WORD.findall(value)
    elif isinstance(value, list):
        for item in value:
            yield from words_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from WORD.findall(key)
            yield from words_of(item)


@dataclass
class Cell:
    """What the check and the search find of a form of rows in a template: the missing words, or `REFUSED`."""

    template: str
    form: str
    checked: set[str] | str
    searched: set[str] | str
    kinds: list[str]

    @property
    def agrees(self) -> bool:
        """Whether both find the same."""
        return self.checked == self.searched

    @property
    def is_silent(self) -> bool:
        """Whether words are missing, and the check names no loss."""
        return bool(self.searched) and not self.checked


class Matrix:
    """The cells of all templates and forms, in a folder for the tokenizer."""

    def __init__(self, folder: Path, backend: str = "trl") -> None:
        """Make the tokenizer."""
        self.folder, self.backend = folder, backend
        self.tokenizer.save_pretrained(folder)

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer with a token of the beginning, which some templates print."""
        pin_clock()
        made = make_tokenizer()
        made.bos_token = "<|bos|>"  # noqa: S105 (a special token)
        return made

    def cells_of(self, template: str) -> list[Cell]:
        """Return the cells of a template that TRL ships."""
        return [self.cell_of(template, form) for form in FORMS]

    def cell_of(self, template: str, form: str) -> Cell:
        """Return what the check and the search find of a form in a template."""
        text, example = (SHIPPED / f"{template}.jinja").read_text(encoding="utf-8"), FORMS[form]
        is_trl = self.backend == "trl"
        reading = Reading(
            "demonstrations",
            text,
            self.folder,
            "last" if is_trl else "every",
            obeys_template=is_trl,
            names_reasoning=is_trl,
        )
        outcomes = RowCheck(reading).of_line(json.dumps(example).encode())
        checked: set[str] | str = REFUSED
        kinds = [REFUSED]
        if isinstance(outcomes, list):
            lost = [outcome.text for outcome in outcomes if not outcome.is_rendered]
            checked = {word for each in lost for word in WORD.findall(each.text)}
            kinds = sorted({outcome.text.kind for outcome in outcomes if outcome.is_lost})
        return Cell(template, form, checked, self.search(text, example), kinds)

    def search(self, template: str, example: Row) -> set[str] | str:
        """Return the words of a row that occur less often in what transformers renders, or `REFUSED`."""
        self.tokenizer.chat_template = template
        messages, tools = as_chat(example["messages"]), example.get("tools")
        try:
            rendering = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            # the prompt of the last answer is rendered as well, by trainers and by the check
            self.tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template is a program, and may raise anything
            return REFUSED
        found, asked = Counter(WORD.findall(rendering.lower())), Counter(words_of([example["messages"], tools]))
        return {word for word, times in asked.items() if found[word] < times}


def main() -> None:
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--backend", choices=("trl", "nemo_rl"), default="trl")
    arguments = parser.parse_args()
    templates = FIRST[:2] if arguments.smoke else sorted(path.stem for path in SHIPPED.glob("*.jinja"))
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), arguments.backend)
        cells = {template: matrix.cells_of(template) for template in templates}
    every = [cell for found in cells.values() for cell in found]
    print(f"# What the chat templates of TRL print, as backend {arguments.backend} gives them rows\n")
    print("An empty cell prints all texts of such a row. Others name what is lost, which the preflight refuses.\n")
    print(head("template", *FORMS))
    for template, found in cells.items():
        print(row(template, *(", ".join(cell.kinds) for cell in found)))
    refused = sum(cell.searched == REFUSED for cell in every)
    loses = sum(bool(cell.searched) for cell in every) - refused
    silent, differing = sum(cell.is_silent for cell in every), sum(not cell.agrees for cell in every)
    print(f"\nOf {len(every)} cells {loses} lose texts, and the template refuses {refused}. Lost without a word of the")
    print(f"check: {silent}. Cells in which the search in transformers' rendering finds other texts: {differing}.")


if __name__ == "__main__":
    main()
