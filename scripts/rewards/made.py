"""Responses made from a row, right and wrong ones, to try a reward on.

What a row tells of its right answer is read by its environment's function in `ANSWERS`; of other environments only the
responses are made that deserve nothing anywhere.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Literal

from jsonschema.validators import validator_for

from scripts.recipe.environment import Environment
from scripts.rewards.judge import conversation, last_question
from scripts.rewards.workplace import run

Row = dict[str, Any]
NO_ANSWER = "I do not know."


@dataclass(frozen=True)
class Made:
    """A response to try a reward on; `if_paid`, what it leads to that it is worth more than a wrong answer."""

    kind: Literal["good", "bad", "boundary", "adversarial"]
    what: str
    text: str
    if_paid: Literal["stop", "warn"] | None = None


@dataclass(frozen=True)
class Answers:
    """What a row tells of its answers.

    `allowed` are other forms of the right one, by their names, `tricks` responses that are made to be paid wrongly.
    `others_are_wrong`: so are the right answers to other rows. `any_text_is_right`: a copy of the prompt may be, and
    `nothing_is_right`: even an empty answer.
    """

    good: str | None = None
    wrong: dict[str, str] = field(default_factory=dict)
    allowed: dict[str, str] = field(default_factory=dict)
    tricks: dict[str, str] = field(default_factory=dict)
    others_are_wrong: bool = True
    any_text_is_right: bool = False
    nothing_is_right: bool = False


def made_responses(row: Row, answers: Answers, others: list[str], longest: int) -> list[Made]:
    """The responses to try a row's reward on; `others` are right answers to other rows.

    None is longer than `longest` characters, unless the row itself makes it so.
    """
    made = []
    if answers.good is not None:
        wrong = dict(answers.wrong)
        if not answers.any_text_is_right:
            wrong["no answer"] = NO_ANSWER
        if answers.others_are_wrong and (other := next((it for it in others if it != answers.good), None)) is not None:
            wrong["another row's answer"] = other
        made += [Made("good", "the right answer", answers.good)]
        made += [Made("bad", what, text) for what, text in wrong.items()]
        made += [Made("boundary", what, text) for what, text in answers.allowed.items()]
        made += [Made("adversarial", what, text, if_paid="warn") for what, text in answers.tricks.items()]
    prompt, question = "\n".join(message["content"] for message in conversation(row)), last_question(row)
    if_copied, if_odd = (None, None) if answers.any_text_is_right else ("stop", "warn")
    if_empty = None if answers.nothing_is_right else "stop"
    unit = f"{' '.join(question.split()) or 'a'} "
    return [
        *made,
        Made("adversarial", "an empty answer", "", if_empty),
        Made("adversarial", "white space", " \n\t\n ", if_empty),
        Made("adversarial", "a copy of the prompt", prompt, if_paid=if_copied),
        Made(
            "adversarial",
            "a copy of the prompt's last line",
            question.rpartition("\n")[2],
            if_paid=if_copied,
        ),
        Made("adversarial", "the prompt over and over", (unit * (longest // len(unit) + 1))[:longest], if_odd),
        Made("adversarial", "an empty object", "{}", None if answers.good == "{}" else if_odd),
    ]


def answers_of(row: Row, good_answer: Callable[[Row], str | None] | None = None) -> Answers:
    """What a row tells of its answers; `good_answer` is asked of a row whose environment is none of ours."""
    if make := ANSWERS.get(row["agent_ref"]["name"]):
        return make(row)
    return Answers(good_answer(row)) if good_answer is not None else Answers()


def _spaced(text: str) -> dict[str, str]:
    return {"white space around the right answer": f"\n  {text} \n"}


def _math(row: Row) -> Answers:
    good = rf"\boxed{{{row['expected_answer']}}}"
    allowed = _spaced(good) | {"the right answer in a sentence": f"The answer is {good}."}
    return Answers(good, allowed=allowed, tricks={"an empty box": r"\boxed{}"})


def _mcqa(row: Row) -> Answers:
    if (row.get("template_metadata") or {}).get("output_regex"):
        return Answers()
    right = row["expected_answer"].strip().upper()
    options = {letter.upper(): text for option in row["options"] for letter, text in option.items() if text is not None}
    others = [letter for letter in options if letter != right]
    colon = row.get("grading_mode", "").startswith("lenient_answer_colon")

    def chosen(text: str) -> str:
        return f"Answer: {text}" if colon else rf"\boxed{{{text}}}"

    allowed = {"a small heading": f"answer: {right}"} if colon else {"a letter in brackets": chosen(f"({right})")}
    tricks = {"all letters at once": chosen(", ".join(options))} if others else {}
    if others and not colon:
        tricks["each letter in turn, a wrong one first"] = "\n".join(map(chosen, [*others, right]))
    return Answers(
        chosen(right),
        wrong={"a wrong letter": chosen(others[0])} if others else {},
        allowed=allowed | _spaced(chosen(right)),
        tricks=tricks,
        others_are_wrong=False,
    )


def _structured_outputs(row: Row) -> Answers:
    if row.get("schema_type", "json") not in ("json", "yaml") or row.get("response_mode") == "tool_call":
        return Answers()
    schema = json.loads(row["schema_str"])
    try:
        value = _instance(schema)
        right = json.dumps(value)
        if not validator_for(schema)(schema).is_valid(value):
            return Answers()
    except (KeyError, TypeError, IndexError, RecursionError):
        return Answers()
    return Answers(
        right,
        wrong={"JSON cut short": right[:-1]},
        allowed={"JSON on several lines": f"\n{json.dumps(value, indent=2)}\n"},
        others_are_wrong=False,
    )


def _instance(schema: dict[str, Any]) -> Any:
    """A value that a plain schema describes; KeyError for one that says more than is read here."""
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _instance(schema[key][0])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    makers: dict[str, Callable[[], Any]] = {
        "object": lambda: {name: _instance(it) for name, it in schema.get("properties", {}).items()},
        "array": lambda: [_instance(schema["items"]) for _ in range(schema.get("minItems", 0))],
        "string": lambda: "a" * max(1, schema.get("minLength", 1)),
        "integer": lambda: schema.get("minimum", 0),
        "number": lambda: schema.get("minimum", 0),
        "boolean": lambda: True,
        "null": lambda: None,
    }
    return makers[kind]()


def _instruction_following(row: Row) -> Answers:
    """Keywords and numbers of words are put together; a copied prompt may well obey other instructions."""
    task, wanted = row | (row.get("verifier_metadata") or {}), {}
    for name, arguments in zip(task.get("instruction_id_list") or (), task.get("kwargs") or (), strict=False):
        wanted.setdefault(name, []).append(arguments or {})
    try:
        words = _words(wanted)
    except (KeyError, TypeError):
        words = []
    if not words:
        return Answers(any_text_is_right=True)
    return Answers(" ".join(words), allowed=_spaced(" ".join(words)))


def _words(wanted: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Words that obey instructions on keywords and the number of words; none where there are others."""
    exist, often, counted = (
        wanted.get(name, []) for name in ("keywords:existence", "keywords:frequency", "length_constraints:number_words")
    )
    if sum(map(len, (exist, often, counted))) < sum(map(len, wanted.values())):
        return []
    if any(given["relation"] != "at least" for given in often):
        return []
    words = [word for given in exist for word in given["keywords"]]
    words += [given["keyword"] for given in often for _ in range(given["frequency"])]
    for given in counted if words else ():
        if given["relation"] == "at least":
            words += [words[0]] * (given["num_words"] - len(words))
        elif len(words) >= given["num_words"]:
            return []
    return words


def _tool_use(row: Row) -> Answers:
    """Where one call is expected the first one made counts, so in a call of every tool the right one is last."""
    expected = row["expected_action"]
    if expected["type"] == "message":
        return Answers(
            "Here is what I found.",
            wrong={"a call": _called("look_up", {})},
            others_are_wrong=False,
            any_text_is_right=True,
        )
    given = [expected] if expected["type"] == "function_call" else expected["calls"]
    calls = [(call["name"], json.loads(call["arguments"])) for call in given]
    right = "\n".join(starmap(_called, calls))
    tools = [tool["name"] for tool in row["responses_create_params"].get("tools") or () if tool.get("name")]
    tools.sort(key=calls[0][0].__eq__)
    every = "\n".join(_called(tool, arguments) for _, arguments in calls for tool in tools)
    return Answers(
        right,
        wrong={
            "a call of another name": "\n".join(_called(f"{name}_", arguments) for name, arguments in calls),
            "an argument too many": "\n".join(_called(name, {**arguments, "_": 1}) for name, arguments in calls),
        },
        allowed=_spaced(right),
        tricks={"a call of every tool": every} if len(tools) > 1 else {},
        others_are_wrong=False,
    )


def _workplace(row: Row) -> Answers:
    """Where the expected calls change nothing, making none is right."""
    truth = row["ground_truth"]
    calls = json.loads(truth) if isinstance(truth, str) else truth
    expected = [(call["name"], json.loads(call["arguments"])) for call in calls]
    if run(expected) == run([]):
        return Answers(any_text_is_right=True, nothing_is_right=True)
    right = "\n".join(starmap(_called, expected))
    return Answers(right, allowed=_spaced(right), others_are_wrong=False)


def _calendar(row: Row) -> Answers:
    return Answers(any_text_is_right=not row["exp_cal_state"])


def _reasoning_gym(row: Row) -> Answers:
    """Scorers pay any answer at all a little, so without a right one nothing says what too much is."""
    if not isinstance(row.get("answer"), str):
        return Answers(any_text_is_right=True)
    right = f"<answer>{row['answer']}</answer>"
    return Answers(right, allowed={"words before the right answer": f"I think it is {right}"}, others_are_wrong=False)


def _string_match(row: Row) -> Answers:
    answer, mode = row["expected_answer"], row.get("extraction_mode", "final_answer")
    right = {"boxed": rf"\boxed{{{answer}}}", "final_answer": f"Answer: {answer}"}.get(mode, answer)
    return Answers(right, allowed=_spaced(right))


def _called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _reference(row: Row) -> Answers:
    return Answers(row["reference"]) if isinstance(row.get("reference"), str) else Answers()


def _expected_answer(row: Row) -> Answers:
    if (row.get("template_metadata") or {}).get("output_regex"):
        return Answers()
    return Answers(row["expected_answer"], allowed=_spaced(row["expected_answer"]))


ANSWERS: dict[str, Callable[[Row], Answers]] = {
    Environment.MATH: _math,
    Environment.MCQA: _mcqa,
    Environment.STRUCTURED_OUTPUTS: _structured_outputs,
    Environment.INSTRUCTION_FOLLOWING: _instruction_following,
    Environment.CALENDAR: _calendar,
    Environment.WORKPLACE: _workplace,
    Environment.REASONING_GYM: _reasoning_gym,
    Environment.STRING_MATCH: _string_match,
    Environment.TOOL_USE: _tool_use,
    Environment.TOOLCALL_SCHEMA: _tool_use,
    Environment.SEARCH_PIVOT: _tool_use,
    Environment.SWE_PIVOT: _tool_use,
    Environment.PARALLEL_TOOL_USE: _tool_use,
    Environment.GENRM: _reference,
    Environment.EQUIVALENCE: _expected_answer,
    Environment.LC_JUDGE: _expected_answer,
}
