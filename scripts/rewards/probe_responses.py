"""Responses made from a row, right and wrong ones, to try a reward on."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from scripts.rewards.spec import Answers, CheapAnswer
from scripts.rows.messages import conversation, last_question

Row = dict[str, Any]
NO_ANSWER = "I do not know."
EVERYWHERE = ("a", "no", "hello", "1", "[]", "{}", "<r/>", r"\boxed{}", "I cannot help with that.")


@dataclass(frozen=True)
class ProbeResponse:
    """A response to try a reward on; `if_paid`, what it leads to that it is worth more than a wrong answer.

    `remedy` is what its row would need, where the environment is known to pay it too easily.
    """

    kind: Literal["good", "bad", "boundary", "adversarial", "cheap"]
    what: str
    text: str
    if_paid: Literal["stop", "warn"] | None = None
    remedy: str = ""


def probe_responses(row: Row, answers: Answers, other_rows: list[str], longest: int) -> list[ProbeResponse]:
    """The responses to try a row's reward on; `other_rows` are right answers to those.

    None is longer than `longest` characters, unless the row itself makes it so.
    """
    responses = []
    if answers.good is not None:
        wrong = dict(answers.wrong)
        if not answers.any_text_is_right:
            wrong["no answer"] = NO_ANSWER
        others = [answer for answer in other_rows if answer != answers.good]
        if answers.other_rows_are_wrong and others:
            wrong["another row's answer"] = others[0]
        responses += [ProbeResponse("good", "the right answer", answers.good)]
        responses += [ProbeResponse("bad", what, text) for what, text in wrong.items()]
        responses += [ProbeResponse("boundary", what, text) for what, text in answers.allowed.items()]
        responses += [ProbeResponse("adversarial", what, text, if_paid="warn") for what, text in answers.tricks.items()]
    prompt, question = "\n".join(message["content"] for message in conversation(row)), last_question(row)
    if_copied, if_odd = (None, None) if answers.any_text_is_right else ("stop", "warn")
    if_empty = None if answers.nothing_is_right else "stop"
    unit = f"{' '.join(question.split()) or 'a'} "
    return [
        *responses,
        ProbeResponse("adversarial", "an empty answer", "", if_empty),
        ProbeResponse("adversarial", "white space", " \n\t\n ", if_empty),
        ProbeResponse("adversarial", "a copy of the prompt", prompt, if_copied),
        ProbeResponse("adversarial", "a copy of the prompt's last line", question.rpartition("\n")[2], if_copied),
        ProbeResponse("adversarial", "the prompt over and over", (unit * (longest // len(unit) + 1))[:longest], if_odd),
    ]


def known_cheap(row: Row, cheap: Iterable[CheapAnswer]) -> list[ProbeResponse]:
    """The answers to a row that say nothing of its prompt and that its environment is known to pay too easily."""
    made = [(it, it.text(row)) for it in cheap]
    return [ProbeResponse("cheap", it.what, text, "warn", it.remedy) for it, text in made if text is not None]


def other_cheap(good: str | None, known: Iterable[ProbeResponse]) -> list[ProbeResponse]:
    """Answers that say nothing of any prompt, but those that are known and what states the right answer."""
    texts = {response.text for response in known}
    right = set(_words(good or "")) - {"boxed", "Answer"}
    return [
        ProbeResponse("cheap", f"`{text}`", text, "warn")
        for text in EVERYWHERE
        if text not in texts and not (right and set(_words(text)) == right)
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)
