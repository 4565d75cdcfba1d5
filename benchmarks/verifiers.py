"""How many responses a second each environment's verifier checks, on two cores.

    python benchmarks/verifiers.py > benchmarks/verifiers.md

Every row is made here, as published ones are shaped, and answered by turns rightly and wrongly. No response is checked
twice. What runs in confined processes is asked by two threads, as a step's rollouts are; the rest by one.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS, check_row

SECONDS = 5.0
CORES = 2
Row = dict[str, Any]
Make = Callable[[int], tuple[Row, str]]


def call(name: str, **arguments: Any) -> str:
    """A response that calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def math(number: int) -> tuple[Row, str]:
    """A fraction; every other response is wrong."""
    row = {"question": "?", "expected_answer": rf"\frac{{{number}}}{{{number + 7}}}"}
    return row, rf"So the value is \boxed{{\dfrac{{{number * 3}}}{{{(number + 7) * 3 + number % 2}}}}}."


def mcqa(number: int) -> tuple[Row, str]:
    """Ten options after some reasoning."""
    options = [{letter: f"option {letter} of {number}"} for letter in "ABCDEFGHIJ"]
    return {"options": options, "expected_answer": "C"}, f"Let us see. {'word ' * 200}\\boxed{{{'CD'[number % 2]}}}"


def structured_outputs(kind: str) -> Make:
    """An object of four fields in a format."""

    def make(number: int) -> tuple[Row, str]:
        schema = {"type": "object", "properties": {f"field{place}": {"type": "integer"} for place in range(4)}}
        values = {f"field{place}": number for place in range(4 - number % 2)}
        lines = "\n".join(f"{name}: {value}" for name, value in values.items())
        text = json.dumps(values) if kind == "json" else lines
        return {"schema_type": kind, "schema_str": json.dumps(schema)}, text

    return make


def instruction_following(number: int) -> tuple[Row, str]:
    """Three instructions on 300 words."""
    names = ["keywords:frequency", "detectable_format:title", "length_constraints:number_sentences"]
    arguments = [
        {"keyword": "red", "frequency": 2, "relation": "at least"},
        None,
        {"num_sentences": 5, "relation": "at least"},
    ]
    row = {"instruction_id_list": names, "kwargs": arguments, "prompt": ""}
    return row, f"<<Title {number}>>\n" + "The red cat sat on a mat. " * (50 * (number % 2))


def code_gen(number: int) -> tuple[Row, str]:
    """A program with ten tests; every other one fails the last."""
    inputs = [f"{value}\n" for value in range(number, number + 10)]
    outputs = [f"{int(value) ** 2}\n" for value in inputs]
    fault = f" + (n == {number + 9})" if number % 2 else ""
    row = {"verifier_metadata": {"unit_tests": {"inputs": inputs, "outputs": outputs}}}
    return row, f"```python\nn = int(input())\nprint(n * n{fault})\n```"


def calendar(number: int) -> tuple[Row, str]:
    """Six events."""
    wanted = {"duration": 60, "min_time": "9:00", "max_time": "17:00", "constraint": "after 9am"}
    events = [
        {
            "event_id": place,
            "event_name": f"event {number}",
            "start_time": f"{9 + place}:00",
            "duration": 60 + number % 2,
        }
        for place in range(6)
    ]
    return {"exp_cal_state": {str(place): wanted for place in range(6)}}, f"Here: {json.dumps(events)}"


def workplace(number: int) -> tuple[Row, str]:
    """Two calls that change something, after a search."""
    mail = {"recipient": "a@b.c", "subject": f"Subject {number}", "body": "See you there."}
    status = {"customer_id": f"{number:08}", "field": "status", "new_value": "Won"}
    expected = [("email_send_email", mail), ("customer_relationship_manager_update_customer", status)]
    truth = [{"name": name, "arguments": json.dumps(given)} for name, given in expected]
    made = [("email_search_emails", {"query": "subject"}), *expected][: 2 + number % 2]
    return {"ground_truth": truth, "id": number}, "".join(call(name, **given) for name, given in made)


def reasoning_gym(number: int) -> tuple[Row, str]:
    """A sum."""
    row = {"question": "?", "answer": str(number), "metadata": {"source_dataset": "chain_sum"}}
    return row, f"<answer>{number + number % 2}</answer>"


def string_match(number: int) -> tuple[Row, str]:
    """A number in a box, written otherwise."""
    row = {"expected_answer": f"{number}", "extraction_mode": "boxed"}
    return row, rf"\boxed{{\text{{{number * (1 + number % 2)}.0}}}}"


def tool_use(number: int) -> tuple[Row, str]:
    """One call with a sentence and a number."""
    arguments = {"query": f"find the red cat number {number}", "limit": number}
    expected = {"type": "function_call", "name": "search", "arguments": json.dumps(arguments)}
    return {"expected_action": expected}, call("search", query=f"the cat {number}", limit=number + number % 2)


def genrm(number: int) -> tuple[Row, str]:
    """A greeting, judged against a reference."""
    return {"reference": f"Good day, number {number}."}, f"Good day, number {number + number % 2}."


BENCHES: list[tuple[str, Environment, Make]] = [
    ("", Environment.MATH, math),
    ("", Environment.MCQA, mcqa),
    ("json", Environment.STRUCTURED_OUTPUTS, structured_outputs("json")),
    ("yaml", Environment.STRUCTURED_OUTPUTS, structured_outputs("yaml")),
    ("", Environment.INSTRUCTION_FOLLOWING, instruction_following),
    ("programs of 10 tests", Environment.CODE_GEN, code_gen),
    ("", Environment.CALENDAR, calendar),
    ("", Environment.WORKPLACE, workplace),
    ("", Environment.REASONING_GYM, reasoning_gym),
    ("", Environment.STRING_MATCH, string_match),
    ("", Environment.TOOL_USE, tool_use),
    ("the deterministic judge", Environment.GENRM, genrm),
]


def measure(environment: Environment, make: Make) -> tuple[float, float]:
    """Checks a second and the mean reward, over some seconds."""
    verifier = SPECS[environment]
    row, _ = make(0)
    if problem := check_row(row | {"agent_ref": {"name": environment}}):
        raise SystemExit(problem)
    with ThreadPoolExecutor(CORES) as pool:
        spread = pool.map if verifier.confined else map
        list(spread(lambda number: verifier.verify(*make(number)), range(-2 * CORES, 0)))  # the servers start
        started, rewards = time.monotonic(), []
        while time.monotonic() - started < SECONDS:
            done = len(rewards)
            rewards += spread(lambda number: verifier.verify(*make(number)), range(done + 1, done + 1 + 8 * CORES))
        return len(rewards) / (time.monotonic() - started), sum(rewards) / len(rewards)


def main() -> None:
    """Print the table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(
        "How many responses a second each verifier checks. Made by `python benchmarks/verifiers.py`, "
        f"{CORES} CPU cores, load\n{os.getloadavg()[0]:.1f} before it started; half of the responses are wrong.\n"
    )
    print("| environment | | in a confined process | checks a second | mean reward |")
    print("| --- | --- | --- | --- | --- |")
    for what, environment, make in BENCHES:
        if environment is Environment.REASONING_GYM and find_spec("reasoning_gym") is None:
            continue
        rate, reward = measure(environment, make)
        confined = "yes" if SPECS[environment].confined and what != "json" else ""
        print(f"| `{environment}` | {what} | {confined} | {rate:,.0f} | {reward:.2f} |", flush=True)


if __name__ == "__main__":
    main()
