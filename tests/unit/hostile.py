"""Responses that a policy may write to break a verifier or to be paid for nothing, and rows to throw them at.

As a program (``python -m tests.unit.hostile``) it throws all of them at every verifier, and 10,000 made of their parts
at each; with ``--confined`` only those that are meant for the verifiers in confined processes, at these.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.recipe.environment import Environment
from scripts.rewards.environments import code_gen, math, structured_outputs
from scripts.rewards.registry import reward_groups, score

Row = dict[str, Any]
DEEP = 20_000
SLOW = 10.0
FORGED = json.dumps({"ended": "returned", "value": 1.0})

# Python literals and JSON values that some reader of the two refuses, cannot hold, or takes for more than they are.
LITERALS = {
    "a set": "{1}",
    "an empty set": "set()",
    "bytes": "b'a'",
    "a complex number": "1j",
    "an ellipsis": "...",
    "a tuple": "(1, 2)",
    "a key that is a tuple": "{(1, 2): 3}",
    "a key that is a number": "{1: 2}",
    "a key that is None": "{None: 2}",
    "a key that is no text": "{b'a': 2}",
    "a key that cannot be hashed": "{[]: 1}",
    "a set in a set": "{{1}}",
    "an unpacked dictionary": "{**{}}",
    "an unpacked list": "[*[1]]",
    "a name": "print",
    "an attribute": "().__class__",
    "a call": "__import__('os').system('true')",
    "a lambda": "(lambda: 1)()",
    "a comprehension": "[i for i in range(9)]",
    "a walrus": "(a := 1)",
    "an f-string": "f'{1}'",
    "a sum": "1 + 1",
    "a product of texts": "'a' * 10**9",
    "a power": "9**9**9",
    "a lone surrogate": r"'\ud800'",
    "a NUL": r"'\0'",
    "a bad escape": r"'\xz'",
    "a name of no character": r"'\N{NO SUCH}'",
    "a starred call": "f(*[1])",
    "octal": "0777",
    "a yield": "(yield)",
    "an await": "await x",
    "two lines": "1\n, b=2",
    "a comment": "1 # )]",
    "nested brackets": "[" * 200 + "]" * 200,
    "deep brackets": "[" * DEEP + "]" * DEEP,
    "deep braces": "{1:" * 5000 + "1" + "}" * 5000,
    "minuses": "-" * DEEP + "1",
    "nots": "not " * DEEP + "1",
    "deep attributes": "a" + ".a" * DEEP,
    "deep subscripts": "a" + "[0]" * DEEP,
    "deep calls": "f(" * DEEP + ")" * DEEP,
    "deep sums": "1" + "+1" * DEEP,
    "deep texts": "'a' " * DEEP,
    "5,000 digits": "9" * 5000,
    "4,000 digits": "9" * 4000,
}
VALUES = {
    "NaN": "NaN",
    "infinity": "Infinity",
    "minus infinity": "-Infinity",
    "1e400": "1e400",
    "1e308": "1e308",
    "-0.0": "-0.0",
    "400 digits": "9" * 400,
    "4,000 digits": "9" * 4000,
    "5,000 digits": "9" * 5000,
    "400 digits after the point": "0." + "3" * 400,
    "a huge exponent": "1e" + "9" * 30,
    "a tiny exponent": "1e-" + "9" * 30,
    "null": "null",
    "true": "true",
    "an empty list": "[]",
    "an empty object": "{}",
    "a list of nulls": "[null, null]",
    "a lone surrogate": r'"\ud800"',
    "two halves the wrong way round": r'"\udc00\ud800"',
    "a NUL": r'"\u0000"',
    "an empty key": '{"": 1}',
    "a surrogate for a key": r'{"\udfff": 1}',
    "the key __class__": '{"__class__": 1}',
    "the key $ref": '{"$ref": "file:///etc/passwd"}',
    "the same key twice": '{"a": 1, "a": 2}',
    "900 brackets": "[" * 900 + "]" * 900,
    "deep brackets": "[" * DEEP + "]" * DEEP,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "brackets that do not close": "[" * DEEP,
    "objects that do not close": '{"a":' * DEEP,
    "a long text": '"' + "a" * DEEP + '"',
    "many numbers": "[" + "1," * DEEP + "1]",
    "a text that does not close": '"a',
    "a comma too many": "[1,]",
    "a byte order mark": "\ufeff1",
    "Arabic digits": "٣",
    "a superscript": "²",
}


def call(value: str, name: str = "look_up") -> str:
    """A call of a tool in tags, with one argument."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {value}}}}}</tool_call>'


EXPRESSIONS = [
    "9^{9^{9^{9}}}",
    r"\frac{1}{0}",
    r"\sqrt{" * 500,
    "x" + "!" * 500,
    r"\int" * 300,
    r"\sum_{i=1}^{10^{99}} i",
]
EXPRESSIONS += [
    "{" * DEEP,
    "}" * DEEP,
    "9" * 5000,
    "1e" + "9" * 20,
    r"\begin{matrix}" * 200,
    "(" * 5000 + "1" + ")" * 5000,
]
EXPRESSIONS += [r"\text{__import__('os')._exit(0)}", "__import__('os')._exit(0)", r"\mathrm{exec}(1)", "x=" * 500 + "1"]
PYTHON = [
    f"__import__('os').write(3, b'{FORGED}') or __import__('os')._exit(0)",
    f"__import__('os').pwrite(3, b'{FORGED}', 0) + __import__('os')._exit(0)",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "open('/proc/self/mem', 'wb')",
    "exec('import os; os._exit(0)')",
    "globals().update(compare=lambda *_: 1.0)",
    "(lambda f: f(f))(lambda f: f(f))",
    "Symbol('x').__class__.__init__.__globals__",
    "lambdify([], 'x')()",
    "sympify('__import__(\"os\")._exit(0)')",
    "S('__import__(\"os\")._exit(0)')",
    "parse_expr('1')",
    "Function('f')(9)**9**9",
    "factorial(factorial(9999))",
    "Integer(24).__class__.__eq__.__globals__",
    "'a'.__mul__(10**10)",
    "24 if 1 else 0",
    "1_2 * 2",
    "9**9**9**9",
    "10**(10**10)",
    "2**2**2**2**2**2",
    "(" * 5000 + "24" + ")" * 5000,
    "-" * DEEP + "24",
    "[" * DEEP + "]" * DEEP,
    "1" * 5000,
    "0x18",
    "2.4e1",
    "24 # 1 2 3 4",
    "x.diff(x)",
    "x.subs(x, 1)",
    "Integral(x, (x, 0, 10**9)).doit()",
    "True and 24",
    "24;24",
    "ℯ + 𝟏",
    "\\\n24",
]
BOXED = [rf"\boxed{{{expression}}}" for expression in EXPRESSIONS]
ANSWERS = [f"<answer>{expression}</answer>" for expression in PYTHON]
TEXTS = [
    "\ud800",
    "\udfff" * 100,
    "\x00",
    "\x00" * DEEP,
    "\u202e" * 100,
    "\u0300" * DEEP,
    "ﷺ" * DEEP,
    "a" * 200_000,
    " " * DEEP + "a",
    "\n" * DEEP,
    "a " * DEEP,
    "a. " * DEEP,
    "." * DEEP,
    "*" * DEEP,
    "<<" * DEEP,
    "[" * DEEP,
    "<think>" * DEEP,
    "</think>" * DEEP,
    "<tool_call>" * DEEP,
    "<tool_call>{" * DEEP + "}</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": 1}</tool_call>',
    '<tool_call>{"name": "a", "arguments": []}</tool_call>',
    '<tool_call>{"name": "a", "arguments": null}</tool_call>',
    "<answer>" * DEEP,
    r"\boxed{" * DEEP,
    r"\boxed{" * 500 + "}" * 500,
    r"\boxed{\text{" * 500,
    "[{" * DEEP,
    '[{"a": ' * DEEP,
    "[{}]" * DEEP,
    "[{}, 1]",
    '[{"a": 1}, null]',
    "Answer: " + "(" * DEEP,
    "Answer: " + r"\text{" * 500 + "x" + "}" * 500,
    "Answer: " + "9" * 5000,
    "Answer: nan",
    "Answer: " + "1," * DEEP,
    "```python\n" + "(" * DEEP + "\n```",
    "```python\n\x00\n```",
    "```python\n\ud800\n```",
    f"```python\nimport os\nos.write(3, b'{FORGED}')\nos._exit(0)\n```",
    f"```python\nimport os\nfor n in range(64):\n  try: os.write(n, b'{FORGED}')\n  except OSError: pass\nos._exit(0)\n```",
    "```python\nimport os, signal\nos.kill(os.getppid(), 9)\n```",
    "```python\nimport sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()\n```",
    "```python\nx = [0] * 10**10\n```",
    "```python\nprint('a' * 10**9)\n```",
    "```",
    "[f()]",
    "[f(a=1)" * 2000,
    "[f(**{})]",
    "[f(a=1, a=2)]",
    "[f.g(a=1)]",
    "[f(1)]",
    "[" + "f(a=1)," * 2000 + "f(a=1)]",
]  # fmt: skip


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
    return {"agent_ref": {"type": "responses_api_agents", "name": environment}, **fields} | {
        "responses_create_params": {"input": [{"role": "user", "content": "?"}], **fields.get("request", {})}
    }


def structured(text: str, **fields: Any) -> Row:
    """A row of structured_outputs."""
    return prompt(Environment.STRUCTURED_OUTPUTS, schema_type="json", schema_str=text, **fields)


_NUMBER = schema(a={"type": "number", "multipleOf": 0.01, "maximum": -5})
_CALL = {"type": "function_call", "name": "look_up", "arguments": '{"a": {"b": [1.5, "x"]}}'}


# Rows that none of the hostile responses answers: what is paid for one is a false reward.
IN_PROCESS: dict[str, Row] = {
    "mcqa": prompt(Environment.MCQA, options=[{"A": "red"}, {"B": "blue"}], expected_answer="B"),
    "mcqa, lenient": prompt(
        Environment.MCQA, options=[{"A": "red"}, {"B": "blue"}], expected_answer="B", grading_mode="lenient_boxed"
    ),
    "mcqa, colon": prompt(
        Environment.MCQA, options=[{"A": "red"}, {"B": "blue"}], expected_answer="B", grading_mode="lenient_answer_colon"
    ),
    "mcqa, its own expression": prompt(
        Environment.MCQA,
        options=[{"A": "red"}, {"B": "blue"}],
        expected_answer="B",
        template_metadata={"output_regex": r"(\w+\s*)+choice: (?:.*)([A-D])"},
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
    "structured, a choice": structured(json.dumps({"anyOf": [{"enum": ["zebra"]}, {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 20}]})
    ),
}  # fmt: skip
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
