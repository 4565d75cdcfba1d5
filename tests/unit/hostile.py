"""Responses that a policy may write to break a verifier or to be paid for nothing, and rows to throw them at.

As a program (``python -m tests.unit.hostile``) it throws all of them at every verifier, and 10,000 made of their parts
at each; with ``--confined`` only those that are meant for the verifiers in confined processes, at these.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts.recipe.environment import Environment
from scripts.rewards.environments import code_gen, math, structured_outputs
from scripts.rewards.registry import reward_groups, score

Row = dict[str, Any]
SLOW = 10.0
PARTS = yaml.safe_load(Path(__file__).with_name("hostile_responses.yaml").read_text())


def text_of(parts: str | list[str | list]) -> str:
    """A text, or the one of such parts, of which a list is a text and how often it stands there."""
    if isinstance(parts, str):
        return parts
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


LITERALS, VALUES = ({what: text_of(parts) for what, parts in PARTS[kind].items()} for kind in ("literals", "values"))
EXPRESSIONS, PYTHON, TEXTS = ([text_of(parts) for parts in PARTS[kind]] for kind in ("expressions", "python", "texts"))
BOXED = [rf"\boxed{{{expression}}}" for expression in EXPRESSIONS]
ANSWERS = [f"<answer>{expression}</answer>" for expression in PYTHON]


def call(value: str, name: str = "look_up") -> str:
    """A call of a tool in tags, with one argument."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {value}}}}}</tool_call>'


def responses() -> Iterator[tuple[str, str]]:
    """Every hostile response, by what it is."""
    for what, value in LITERALS.items():
        yield f"pythonic, {what}", f"[look_up(a={value})]"
    for what, value in VALUES.items():
        yield f"bare, {what}", value
        yield f"in an object, {what}", f'{{"a": {value}}}'
        yield f"call, {what}", call(value)
    for kind, texts in (("boxed", BOXED), ("expression", ANSWERS), ("text", TEXTS)):
        for number, text in enumerate(texts):
            yield f"{kind}, {number}", text


HOSTILE = dict(responses())


def schema(**fields: Any) -> str:
    """A schema of an object with these fields."""
    return json.dumps({"type": "object", "properties": fields})


def prompt(environment: str, **fields: Any) -> Row:
    """A row of an environment, with a prompt that obeys its contract."""
    request = {"input": [{"role": "user", "content": "?"}]}
    return {
        "agent_ref": {"type": "responses_api_agents", "name": environment},
        **fields,
        "responses_create_params": request,
    }


def structured(text: str, **fields: Any) -> Row:
    """A row of structured_outputs."""
    return prompt(Environment.STRUCTURED_OUTPUTS, schema_type="json", schema_str=text, **fields)


_NUMBER = schema(a={"type": "number", "multipleOf": 0.01, "maximum": -5})
_SEVENFOLD = {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 20}
_COLOUR = {"options": [{"A": "red"}, {"B": "blue"}], "expected_answer": "B"}
_CALL = {"type": "function_call", "name": "look_up", "arguments": '{"a": {"b": [1.5, "x"]}}'}


# Rows that none of the hostile responses answers: what is paid for one is a false reward.
IN_PROCESS: dict[str, Row] = {
    "mcqa": prompt(Environment.MCQA, **_COLOUR),
    "mcqa, lenient": prompt(Environment.MCQA, **_COLOUR, grading_mode="lenient_boxed"),
    "mcqa, colon": prompt(Environment.MCQA, **_COLOUR, grading_mode="lenient_answer_colon"),
    "mcqa, its own expression": prompt(
        Environment.MCQA, **_COLOUR, template_metadata={"output_regex": r"(\w+\s*)+choice: (?:.*)([A-D])"}
    ),
    "tool_use": prompt(Environment.TOOL_USE, expected_action=_CALL),
    "tool_use, a pivot": prompt(Environment.SWE_PIVOT, expected_action=_CALL),
    "instructions": prompt(
        Environment.INSTRUCTION_FOLLOWING,
        id=1,
        prompt="?",
        instruction_id_list=["keywords:existence", "detectable_format:title"],
        kwargs=[{"keywords": ["zebra"]}, None],
    ),
    "instructions, sentences": prompt(
        Environment.INSTRUCTION_FOLLOWING,
        id=1,
        prompt="?",
        instruction_id_list=["copy:repeat_phrase", "keywords:keyword_specific_position", "keywords:frequency"],
        kwargs=[
            {"phrase": "a b c", "small_n": 3},
            {"keyword": "zebra", "n": 1, "m": 1},
            {"keyword": "zebra", "frequency": 1, "relation": "at least"},
        ],
    ),
    "structured, json": structured(_NUMBER),
    "structured, a choice": structured(json.dumps({"anyOf": [{"enum": ["zebra"]}, _SEVENFOLD]})),
}
IN_LANGUAGE = prompt(
    Environment.INSTRUCTION_FOLLOWING,
    id=1,
    prompt="?",
    instruction_id_list=["keywords:existence", "language:response_language"],
    kwargs=[{"keywords": ["zebra"]}, {"language": "de"}],
)  # takes milliseconds a response
CONFINED: dict[str, Row] = {
    "math": prompt(Environment.MATH, question="?", expected_answer=r"\frac{17}{23}"),
    "math, an interval": prompt(Environment.MATH, question="?", expected_answer="(17, 23]"),
    "code_gen": prompt(
        Environment.CODE_GEN, verifier_metadata={"unit_tests": {"inputs": ["17\n"], "outputs": ["23\n"]}}
    ),
    "code_gen, a function": prompt(
        Environment.CODE_GEN, verifier_metadata={"unit_tests": {"inputs": ["17"], "outputs": ["23"], "fn_name": "f"}}
    ),
    "structured, a pattern": structured(schema(a={"type": "string", "pattern": "^(a+)+zebra$"})),
}


def of_parts(count: int, seed: int = 0) -> Iterator[str]:
    """Responses put together from parts of the hostile ones, cut, repeated and joined; a seed's are always the same."""
    rng = random.Random(seed)
    whole = list(HOSTILE.values())
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 4)):
            text = rng.choice(whole)
            start = rng.randrange(max(1, len(text)))
            parts.append(text[start : start + rng.choice((1, 8, 64, 512))] * rng.choice((1, 1, 1, 2, 9)))
        yield rng.choice(("", "", "", " ", "\n", "\x00")).join(parts)


def throw(row: Row, thrown: Iterable[str]) -> list[str]:
    """What is wrong with the rewards of one response after the other: an exception, a reward, or over ten seconds."""
    found = []
    for text in thrown:
        started = time.monotonic()
        try:
            reward = score(row, text)
        except Exception as error:
            found.append(f"{type(error).__name__} for {text[:60]!r}")
            continue
        if reward != 0:
            found.append(f"{reward} for {text[:60]!r}")
        if time.monotonic() - started > SLOW:
            found.append(f"{time.monotonic() - started:.1f} s for {text[:60]!r}")
    return found


def throw_at_once(row: Row, thrown: list[str]) -> list[str]:
    """As `throw`, on all cores."""
    rewards = reward_groups([(row, thrown)])[0]
    return [f"{reward} for {text[:60]!r}" for text, reward in zip(thrown, rewards, strict=True) if reward != 0]


MEANT_FOR = {
    "math": BOXED + ANSWERS,
    "code_gen": [text for text in TEXTS if "```" in text],
    "code_gen, a function": [text for text in TEXTS if "```" in text],
    "structured, a pattern": [json.dumps({"a": "a" * 5000 + "!"})],
}


def confined(seconds: float) -> dict[str, list[str]]:
    """What is wrong with the rewards of the responses that are meant for each confined verifier."""
    for environment in (math, code_gen, structured_outputs):
        environment.SECONDS = seconds
    return {name: throw_at_once(CONFINED[name], texts) for name, texts in MEANT_FOR.items()}


def main() -> None:
    """Print what is wrong, by row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--confined", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=10_000)
    arguments = parser.parse_args()
    found = confined(arguments.seconds)
    if not arguments.confined:
        for name, row in (IN_PROCESS | {"instructions, a language": IN_LANGUAGE} | CONFINED).items():
            started = time.monotonic()
            made = [*HOSTILE.values(), *of_parts(arguments.count)]
            found[name] = throw(row, made) if name not in CONFINED else throw_at_once(row, made)
            print(f"{name}: {len(made)} responses in {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps({name: problems for name, problems in found.items() if problems}, indent=1))


if __name__ == "__main__":
    main()
