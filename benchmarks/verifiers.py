"""How many responses a second each environment's verifier checks, here and by NeMo-Gym's server, on two cores.

    python benchmarks/verifiers.py > benchmarks/verifiers.md

Every row is made here, as published ones are shaped, and answered by turns rightly and wrongly. No response is checked
twice. What runs in confined processes is asked by two threads, the rest by one, and a server by sixteen.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, head, memory_of, row
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.gym_release import Gym, GymServer
from scripts.recipe.site import GYM_PYTHON
from scripts.rewards.gym import RunningServer
from scripts.rewards.registry import SPECS

VERSION = "0.4.0"
SECONDS = 5.0
CORES = 2
AT_ONCE = 16
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
    return {
        "options": options,
        "expected_answer": "C",
        "grading_mode": "strict_single_letter_boxed",
    }, f"Let us see. {'word ' * 200}\\boxed{{{'CD'[number % 2]}}}"


def structured_outputs(number: int) -> tuple[Row, str]:
    """An object of four fields, of which every other one lacks the last."""
    schema = {"type": "object", "properties": {f"field{place}": {"type": "integer"} for place in range(4)}}
    values = {f"field{place}": number for place in range(4 - number % 2)}
    return {"schema_type": "json", "schema_str": json.dumps(schema)}, json.dumps(values)


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


def tool_use(number: int) -> tuple[Row, str]:
    """One call with a sentence and a number."""
    arguments = {"query": f"find the red cat number {number}", "limit": number}
    expected = {"type": "function_call", "name": "search", "arguments": json.dumps(arguments)}
    return {"expected_action": expected}, call("search", query=f"the cat {number}", limit=number + number % 2)


def genrm(number: int) -> tuple[Row, str]:
    """A greeting, judged against a reference."""
    return {"reference": f"Good day, number {number}."}, f"Good day, number {number + number % 2}."


CONFINED = (Environment.MATH, Environment.CODE_GEN)
BENCHES: list[tuple[str, Environment, Make, str | None]] = [
    ("", Environment.MATH, math, "math_with_judge"),
    ("", Environment.MCQA, mcqa, "mcqa"),
    ("", Environment.STRUCTURED_OUTPUTS, structured_outputs, "structured_outputs/structured_outputs_json"),
    ("", Environment.INSTRUCTION_FOLLOWING, instruction_following, None),
    ("programs of 10 tests", Environment.CODE_GEN, code_gen, "code_gen"),
    ("", Environment.TOOL_USE, tool_use, "single_step_tool_use_with_argument_comparison"),
    ("by likeness", Environment.GENRM, genrm, None),
]


def full(environment: Environment, made: tuple[Row, str]) -> tuple[Row, str]:
    """A made row with what every row has."""
    row, response = made
    agent = {"type": "responses_api_agents", "name": environment}
    return {"responses_create_params": {"input": "?"}, "agent_ref": agent, **row}, response


def measure(
    verify: Callable[[Row, str], float], environment: Environment, make: Make, threads: int, seconds: float
) -> tuple[float, float]:
    """Checks a second and the mean reward, over some seconds."""

    def check(number: int) -> float:
        return verify(*full(environment, make(number)))

    with ThreadPoolExecutor(threads) as pool:
        spread = pool.map if threads > 1 else map
        list(spread(check, range(-2 * threads, 0)))  # what is started, starts
        started, rewards = time.monotonic(), []
        while time.monotonic() - started < seconds:
            done = len(rewards)
            rewards += spread(check, range(done + 1, done + 1 + 8 * threads))
        return len(rewards) / (time.monotonic() - started), sum(rewards) / len(rewards)


def measure_gym(name: str, environment: Environment, make: Make, seconds: float) -> list[str]:
    """Columns of the table: Gym's checks a second, their mean reward, the server's seconds to start and its memory."""
    started = time.monotonic()
    server = RunningServer(name, Gym(version=VERSION, servers=[name]), GymServer(), GYM_PYTHON)
    try:
        server.wait()
        start = time.monotonic() - started
        rate, reward = measure(server.verify, environment, make, AT_ONCE, seconds)
        memory = memory_of(server._process.pid) / 1024**2
        return [f"{rate:,.0f}", f"{reward:.2f}", f"{start:.1f}", f"{memory:.0f}"]
    finally:
        server.close()


def main() -> None:
    """Print the table."""
    is_smoke = command_line(__doc__).parse_args().smoke
    seconds = 0.05 if is_smoke else SECONDS
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(
        "How many responses a second each verifier checks, and NeMo-Gym's server in its stead. Made by "
        f"`python\nbenchmarks/verifiers.py`, {CORES} CPU cores, load {os.getloadavg()[0]:.1f} before it started; half "
        "of the responses are wrong.\n"
    )
    print(head("environment", "", "checks a second here", "mean reward", "by Gym", "mean reward", "start, s", "MiB"))
    lacking = set()
    for what, environment, make, server in BENCHES:
        threads = CORES if environment in CONFINED else 1
        rate, reward = measure(SPECS[environment].verify, environment, make, threads, seconds)
        there = ["-"] * 4
        if server and (not is_smoke or environment == Environment.MCQA):
            try:
                there = measure_gym(server, environment, make, seconds)
            except UserError as error:
                lacking.add(str(error))
        print(row(f"`{environment}`", what, f"{rate:,.0f}", f"{reward:.2f}", *there), flush=True)
    print("\n".join(f"\nNot asked: {why}" for why in sorted(lacking)))


if __name__ == "__main__":
    main()
