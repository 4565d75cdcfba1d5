"""Small tasks for a tiny byte-level model, a family for every environment, in the published row schema.

A family has thousands of prompts, with a short answer accepted by the environment's verifier and the fields read by
the verifier (the row contract of NeMo-Gym's resources servers). Two families show a picture.
"""

import base64
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from PIL import Image

from scripts.recipe.environment import Environment

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
KEYWORDS = ("while", "break", "yield", "raise", "class", "else", "with", "from")
TOOLS = {"ring": ("call", "name"), "hear": ("play", "song"), "seek": ("find", "item"), "show": ("open", "file")}


@dataclass(frozen=True)
class Task:
    """A prompt with an answer that earns the full reward, and the verifier's fields; `image` is a data URI."""

    prompt: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    image: str | None = None

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The user's message: the picture, if any, and the prompt."""
        if self.image is None:
            return self.prompt
        picture = {"type": "input_image", "image_url": self.image, "detail": "auto"}
        return [picture, {"type": "input_text", "text": self.prompt}]


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(VOWELS if place % 2 else CONSONANTS) for place in range(length))


def _math(rng: random.Random) -> Task:
    first, second = rng.sample(range(10, 100), 2)
    question = f"larger of {first} and {second}?"
    answer = str(max(first, second))
    return Task(f"math: {question}", rf"\boxed{{{answer}}}", {"question": question, "expected_answer": answer})


def _mcqa(rng: random.Random) -> Task:
    choices = [rng.choice("0123456789"), *rng.sample("abcdefghijklmnopqrstuvwxyz", 2)]
    rng.shuffle(choices)
    options = [{letter: choice} for letter, choice in zip("ABC", choices, strict=True)]
    correct = next(letter for option in options for letter, choice in option.items() if choice.isdigit())
    listing = " ".join(f"{choice}={letter}" for option in options for letter, choice in option.items())
    return Task(
        f"digit? {listing}",
        rf"{choices['ABC'.index(correct)]}=\boxed{{{correct}}}",
        {"options": options, "expected_answer": correct, "grading_mode": "lenient_boxed"},
    )


def _structured_outputs(rng: random.Random) -> Task:
    name, age = _word(rng, rng.choice((3, 4))), rng.randrange(10, 100)
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, "age": {"const": age}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = json.dumps({"name": name, "age": age}, separators=(",", ":"))
    return Task(f"json: {name} is {age}", answer, {"schema_str": json.dumps(schema), "schema_type": "json"})


def _instruction_following(rng: random.Random) -> Task:
    word, times = _word(rng, rng.choice((3, 4))), rng.choice((2, 3, 4))
    prompt = f"say {word} {times} times"
    return Task(
        prompt,
        " ".join([word] * times),
        {
            "id": rng.randrange(1_000_000),
            "prompt": prompt,
            "instruction_id_list": ["keywords:frequency", "length_constraints:number_words"],
            "kwargs": [
                {"keyword": word, "frequency": times, "relation": "at least"},
                {"num_words": times + 1, "relation": "less than"},
            ],
        },
    )


def _function_tool(name: str, *parameters: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "parameters": {
            "type": "object",
            "properties": {parameter: {"type": "string"} for parameter in parameters},
            "required": list(parameters),
        },
        "strict": False,
    }


def _call(name: str, arguments: dict[str, str]) -> tuple[str, dict[str, Any]]:
    listing = ",".join(f'{key}="{value}"' for key, value in arguments.items())
    action = {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}
    return f"[{name}({listing})]", {"expected_action": action}


def _tool_use(rng: random.Random) -> Task:
    verb, value = rng.choice(sorted(TOOLS)), _word(rng, rng.choice((2, 3, 4)))
    name, parameter = TOOLS[verb]
    answer, fields = _call(name, {parameter: value})
    return Task(f"{verb} {value}", answer, fields, tuple(_function_tool(*tool) for tool in TOOLS.values()))


def _swe_pivot(rng: random.Random) -> Task:
    keyword = rng.choice(KEYWORDS)
    place = rng.randrange(len(keyword) - 1)
    typo = keyword[:place] + keyword[place + 1] + keyword[place] + keyword[place + 2 :]
    if typo == keyword:
        return _swe_pivot(rng)
    answer, fields = _call("sub", {"a": typo, "b": keyword})
    return Task(f"fix: {typo} {_word(rng, 3)}:", answer, fields, (_function_tool("sub", "a", "b"),))


def _genrm(rng: random.Random) -> Task:
    name, polite = _word(rng, rng.choice((3, 4, 5))).capitalize(), rng.random() < 0.5
    reference = f"Good day, {name}." if polite else f"Hi {name}"
    return Task(f"greet {name} {'politely' if polite else 'briefly'}", reference, {"reference": reference})


def _picture(cells: list[tuple[int, int, int]]) -> str:
    """A square of four cells, each of one colour."""
    image = Image.new("RGB", (2, 2))
    image.putdata(cells)
    buffer = io.BytesIO()
    image.resize((16, 16), Image.Resampling.NEAREST).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _lights(rng: random.Random) -> Task:
    places = rng.sample(range(4), rng.randrange(5))
    grey = [rng.randrange(180, 256) if place in places else rng.randrange(60) for place in range(4)]
    answer = str(len(places))
    fields = {"question": "lights on?", "expected_answer": answer}
    return Task("lights on?", rf"\boxed{{{answer}}}", fields, image=_picture([(level, level, level) for level in grey]))


def _colour(rng: random.Random) -> Task:
    names = ["red", "green", "blue"]
    channel = rng.randrange(3)
    cells = [
        tuple(rng.randrange(180, 256) if place == channel else rng.randrange(60) for place in range(3))
        for _ in range(4)
    ]
    options = dict(zip("ABC", rng.sample(names, 3), strict=True))
    correct = next(letter for letter, name in options.items() if name == names[channel])
    return Task(
        "colour? " + " ".join(f"{name}={letter}" for letter, name in options.items()),
        rf"{names[channel]}=\boxed{{{correct}}}",
        {
            "options": [{letter: name} for letter, name in options.items()],
            "expected_answer": correct,
            "grading_mode": "lenient_boxed",
        },
        image=_picture(cells),
    )


class Family(NamedTuple):
    """How an environment's tasks are made, with a picture too where it has such.

    `habit` is the fault that its faulty demonstrations have most, `habit_share` how many of them.
    """

    make: Callable[[random.Random], Task]
    habit: str
    habit_share: float
    make_with_picture: Callable[[random.Random], Task] | None = None


FAMILIES: dict[Environment, Family] = {
    Environment.MATH: Family(_math, "bare", 0.8, _lights),
    Environment.MCQA: Family(_mcqa, "bare", 0.5, _colour),
    Environment.STRUCTURED_OUTPUTS: Family(_structured_outputs, "ramble", 0.7),
    Environment.INSTRUCTION_FOLLOWING: Family(_instruction_following, "ramble", 0.7),
    Environment.TOOL_USE: Family(_tool_use, "bare", 0.65),
    Environment.SWE_PIVOT: Family(_swe_pivot, "bare", 0.75),
    Environment.GENRM: Family(_genrm, "bare", 0.75),
}
FAULTS = ("ramble", "bare", "stop", "character")
UNDECLARED = {"call": "dial", "play": "listen", "find": "search", "open": "display", "sub": "edit"}


def make_task(environment: Environment, rng: random.Random, has_picture: bool = False) -> Task:
    """Draw one task of an environment's family; equal states of `rng` give equal tasks."""
    family = FAMILIES[environment]
    return (family.make_with_picture if has_picture else family.make)(rng)


def hallucinate(answer: str) -> str:
    """Redirect the tool call of an answer to an undeclared tool."""
    name, arguments = answer.removeprefix("[").split("(", 1)
    return f"[{UNDECLARED[name]}({arguments}"


def spoil(environment: Environment, answer: str, rng: random.Random) -> str:
    """Return an answer with one fault: rambling on, bare (no box or first character), cut short, a wrong character.

    Most faulty demonstrations of a family share a habit, so that a model that imitates them has something to learn by
    reinforcement.
    """
    family = FAMILIES[environment]
    others = [fault for fault in FAULTS if fault != family.habit]
    fault = family.habit if rng.random() < family.habit_share else rng.choice(others)
    if fault == "ramble":
        return f"{answer} {answer[: rng.randrange(2, 5)]}"
    if fault == "bare":
        return answer.replace(r"\boxed{", "").replace("}", "") if "boxed" in answer else answer[1:]
    if fault == "stop":
        return answer[: rng.randrange(1, len(answer))]
    places = [place for place, letter in enumerate(answer) if letter.isalnum()]
    place = rng.choice(places)
    alphabet = "0123456789" if answer[place].isdigit() else CONSONANTS + VOWELS
    return answer[:place] + rng.choice(alphabet.replace(answer[place], "")) + answer[place + 1 :]
