"""Write prompts that ask for one or two of IFEval's verifiable instructions, and demonstrations that obey one.

``sft.jsonl`` holds demonstrations of one instruction each, ``rlvr.jsonl`` prompts of one or two, so SFT leaves
something to learn. The last rows of each file ask the questions of `HELD_OUT`, which no training row asks. A training
prompt earns the share of its instructions that are obeyed, a held-out one all or nothing.
"""

import json
import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from scripts.files import open_atomically
from scripts.rewards.environments.instruction_following import verify

QUESTIONS = {
    "What is the capital of France?": ("The capital of France is Paris.", "It is Paris."),
    "What is the capital of Italy?": ("The capital of Italy is Rome.", "It is Rome."),
    "What is the capital of Japan?": ("The capital of Japan is Tokyo.", "It is Tokyo."),
    "What is the capital of Egypt?": ("The capital of Egypt is Cairo.", "It is Cairo."),
    "What is the capital of Spain?": ("The capital of Spain is Madrid.", "It is Madrid."),
    "What do bees make?": ("Bees make honey.", "They make sweet honey."),
    "What color is the sky?": ("The sky is blue.", "On a clear day it is blue."),
    "What color is grass?": ("Grass is green.", "It is green."),
    "Name a fruit.": ("An apple is a fruit.", "One fruit is the banana."),
    "Name two fruits.": ("Apples and bananas.", "Two fruits are pears and plums."),
    "Name two animals.": ("Cats and dogs.", "Two animals are lions and bears."),
    "Name two colors.": ("Red and blue.", "Two colors are green and yellow."),
    "Name two drinks.": ("Tea and coffee.", "Two drinks are water and milk."),
    "Name a planet.": ("Mars is a planet.", "One planet is Venus."),
    "Name a river.": ("The Nile is a river.", "One river is the Danube."),
    "Name a season.": ("Winter is a season.", "One season is spring."),
    "Name a musical instrument.": ("The piano is an instrument.", "One is the violin."),
    "Name a vegetable.": ("A carrot is a vegetable.", "One vegetable is the onion."),
    "How many legs does a dog have?": ("A dog has four legs.", "It has four legs."),
    "How many days are in a week?": ("A week has seven days.", "There are seven days."),
    "Is ice cold?": ("Yes it is cold.", "Ice is very cold."),
    "Is fire hot?": ("Yes it is hot.", "Fire is very hot."),
    "Where do fish live?": ("Fish live in water.", "They live in rivers and seas."),
    "Where do birds sleep?": ("Birds sleep in trees.", "Many sleep in their nests."),
    "What is a bicycle?": ("A bicycle is a vehicle with two wheels.", "It is a thing to ride."),
    "What is a spoon?": ("A spoon is a tool to eat soup.", "It is a tool for eating."),
    "What is rain?": ("Rain is water that falls from clouds.", "It is water from the sky."),
    "What is snow?": ("Snow is frozen water from clouds.", "It is frozen rain."),
    "What is a library?": ("A library is a place with many books.", "It is a house of books."),
    "What does a baker do?": ("A baker makes bread.", "A baker bakes bread and cakes."),
    "What does a doctor do?": ("A doctor helps sick people.", "A doctor heals people."),
    "What does a teacher do?": ("A teacher helps people to learn.", "A teacher teaches in a school."),
    "Say good morning to a friend.": ("Good morning my friend.", "Good morning to you."),
    "Say thank you to a neighbor.": ("Thank you my dear neighbor.", "Thank you so much."),
    "Wish a friend a happy birthday.": ("Happy birthday my friend.", "I wish you a happy birthday."),
    "Describe a cat.": ("A cat is small and soft.", "Cats are quiet and clean."),
    "Describe the sea.": ("The sea is deep and blue.", "It is wide and full of life."),
    "Describe the moon.": ("The moon is round and bright.", "It shines at night."),
    "Give a tip for good sleep.": ("Go to bed early.", "Keep the room dark and cool."),
    "Give a tip for good health.": ("Walk every day.", "Eat fruit and drink water."),
}
HELD_OUT = (
    "What is the capital of Egypt?",
    "What color is grass?",
    "Name two drinks.",
    "Name a river.",
    "Name a vegetable.",
    "Is fire hot?",
    "What is snow?",
    "What does a doctor do?",
    "Say thank you to a neighbor.",
    "Describe the sea.",
    "What is a spoon?",
    "Give a tip for good health.",
)
TRAINED = tuple(question for question in QUESTIONS if question not in HELD_OUT)

# In the order in which a demonstration obeys: name, arguments, ways to ask, what makes an answer obey.
INSTRUCTIONS = {
    "title": (
        "detectable_format:title",
        {},
        (
            "Add a title in double angular brackets.",
            "Begin with a title in double angular brackets, such as <<title>>.",
            "Give a title, wrapped in << and >>.",
        ),
        "<<answer>> {}".format,
    ),
    "end": (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ("End with the words: That is all.", "Finish with: That is all.", "The last words must be: That is all."),
        "{} That is all.".format,
    ),
    "postscript": (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        (
            "Add a postscript that begins with P.S.",
            "At the end add a note that starts with P.S.",
            "Close with a P.S. note.",
        ),
        "{} P.S. See you soon.".format,
    ),
    "lowercase": (
        "change_case:english_lowercase",
        {},
        ("Use only lowercase letters.", "Write all in lowercase.", "Do not use capital letters."),
        str.lower,
    ),
    "capitals": (
        "change_case:english_capital",
        {},
        ("Use only capital letters.", "Write all in capital letters.", "Answer in uppercase."),
        str.upper,
    ),
    "quotation": (
        "startend:quotation",
        {},
        (
            "Put the whole answer into double quotation marks.",
            "Wrap your answer in double quotation marks.",
            "Begin and end with a double quotation mark.",
        ),
        '"{}"'.format,
    ),
}
CONTRADICTIONS = {
    frozenset(pair)
    for pair in (
        ("lowercase", "capitals"),
        ("lowercase", "end"),
        ("lowercase", "postscript"),
        ("capitals", "end"),
        ("capitals", "postscript"),
        ("end", "postscript"),
        ("end", "quotation"),
    )
}
ONE = tuple((name,) for name in INSTRUCTIONS)
TWO = tuple(pair for pair in combinations(INSTRUCTIONS, 2) if frozenset(pair) not in CONTRADICTIONS)


@cache
def obeying(question: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the question's answers that obey; few words in capitals are no English to the language detector."""
    answers = QUESTIONS[question]
    for name in names:
        answers = tuple(map(INSTRUCTIONS[name][3], answers))
    return tuple(answer for answer in answers if verify(fields_of(names), answer) == 1)


def fields_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the verifier's fields."""
    return {
        "instruction_id_list": [INSTRUCTIONS[name][0] for name in names],
        "kwargs": [INSTRUCTIONS[name][1] for name in names],
    }


def make_rows(
    questions: tuple[str, ...], combined: tuple[tuple[str, ...], ...], most: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Return at most `most` rows of different prompts, with the verifier's fields and an answer that obeys."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(50 * most):
        question, names = rng.choice(questions), rng.choice(combined)
        answers, shown = obeying(question, names), rng.sample(names, len(names))
        prompt = " ".join([question, *(rng.choice(INSTRUCTIONS[name][2]) for name in shown)])
        if answers and len(rows) < most:
            row = {"prompt": prompt, "id": len(rows), **fields_of(names), "completion": rng.choice(answers)}
            rows.setdefault(prompt, row)
    return list(rows.values())


def write_rows(directory: Path) -> None:
    """Write ``sft.jsonl``, of which the last 24 rows are held out, and ``rlvr.jsonl``, of which the last 96 are."""
    rng = random.Random(11)
    demonstrations = make_rows(TRAINED, ONE, 600, rng) + make_rows(HELD_OUT, ONE, 24, rng)
    training = make_rows(TRAINED, ONE, 150, rng) + make_rows(TRAINED, TWO, 450, rng)
    held_out = make_rows(HELD_OUT, ONE, 36, rng) + make_rows(HELD_OUT, TWO, 60, rng)
    rng.shuffle(training)
    rng.shuffle(held_out)
    shown = [{name: row[name] for name in ("prompt", "completion")} for row in demonstrations]
    prompts = [row | {"grading_mode": "fraction"} for row in training] + held_out
    for row in prompts:
        del row["completion"]
    files = {"sft": shown, "rlvr": prompts}
    for name, rows in files.items():
        with open_atomically(directory / f"{name}.jsonl") as (file,):
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
