"""How many responses a second each environment's verifier checks, on two cores.

    python benchmarks/verifiers.py > benchmarks/verifiers.md
    python benchmarks/verifiers.py --before CHECKOUT > benchmarks/verifiers.md

The second also measures the code of another checkout, by turns, and compares the processors' time that a check takes,
which other work on the machine changes less than checks a second.

Every row is made here, as published ones are shaped, and answered by turns rightly and wrongly. No response is checked
twice. What runs in confined processes is asked by two threads, as a step's rollouts are; the rest by one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(
    0, sys.argv[2] if sys.argv[1:2] == ["--measure"] else str(Path(__file__).parents[1])
)  # see `measure_in`

from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS, check_row

ROOT = Path(__file__).parents[1]
SECONDS = 5.0
ROUNDS = 2
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


def processor_seconds() -> float:
    """What this process and those it has started have used."""
    spent = sum(os.times()[:2])
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            spent += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return spent


def measure(environment: Environment, make: Make) -> tuple[float, float, float]:
    """Checks a second, the mean reward and the milliseconds of processors that a check takes, over some seconds."""
    verifier = SPECS[environment]
    row, _ = make(0)
    if problem := check_row(row | {"agent_ref": {"name": environment}}):
        raise SystemExit(problem)
    with ThreadPoolExecutor(CORES) as pool:
        spread = pool.map if verifier.confined else map
        list(spread(lambda number: verifier.verify(*make(number)), range(-2 * CORES, 0)))  # the servers start
        started, spent, rewards = time.monotonic(), processor_seconds(), []
        while time.monotonic() - started < SECONDS:
            done = len(rewards)
            rewards += spread(lambda number: verifier.verify(*make(number)), range(done + 1, done + 1 + 8 * CORES))
        took, spent = time.monotonic() - started, processor_seconds() - spent
        return len(rewards) / took, sum(rewards) / len(rewards), 1000 * spent / len(rewards)


def measure_in(checkout: Path, number: int) -> tuple[float, float, float]:
    """`measure` of a bench with the code of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(checkout), str(number)]
    return tuple(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def main() -> None:
    """Print the table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*BENCHES[int(sys.argv[3])][1:])))
        return
    before = Path(sys.argv[2]).resolve() if sys.argv[1:2] == ["--before"] else None
    print(
        "How many responses a second each verifier checks. Made by `python benchmarks/verifiers.py`, "
        f"{CORES} CPU cores, load\n{os.getloadavg()[0]:.1f} before it started; half of the responses are wrong."
    )
    if before is not None:
        print(
            f"The last column compares with {commit(before)}, by turns {ROUNDS} times: the processors' time of a check "
            "there, divided by\nthat of a check here."
        )
    print("\n| environment | | in a confined process | checks a second | mean reward |", "ratio |" if before else "")
    print("| --- | --- | --- | --- | --- |", "--- |" if before else "")
    for number, (what, environment, _) in enumerate(BENCHES):
        if environment is Environment.REASONING_GYM and find_spec("reasoning_gym") is None:
            continue
        rounds = [
            (measure_in(ROOT, number), measure_in(before, number) if before else None)
            for _ in range(ROUNDS if before else 1)
        ]
        rate, reward, _ = max(here for here, _ in rounds)
        ratio = sum(there[2] for _, there in rounds) / sum(here[2] for here, _ in rounds) if before else 0
        confined = "yes" if SPECS[environment].confined and what != "json" else ""
        last = f" {ratio:.2f} |" if before else ""
        print(f"| `{environment}` | {what} | {confined} | {rate:,.0f} | {reward:.2f} |{last}", flush=True)


def commit(checkout: Path) -> str:
    """The short name of a checkout's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return f"`{subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()}`"


if __name__ == "__main__":
    main()
