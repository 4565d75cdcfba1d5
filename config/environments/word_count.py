"""Example of an environment of your own: as many words as the row's `words` says, each once, none from the question."""


def verify(row: dict, response: str) -> float:
    """1.0 for the right number of words, less the further off it is."""
    words = response.lower().split()
    if len(set(words)) < len(words) or set(words) & set(_question(row).lower().split()):
        return 0.0
    return max(0.0, 1 - abs(len(words) - row["words"]) / row["words"])


def check(row: dict) -> str | None:
    """Why the row cannot be rewarded."""
    words = row.get("words")
    return None if isinstance(words, int) and words > 0 else f"words is {words!r} instead of a number from 1 on"


def good_answer(row: dict) -> str:
    """An answer that earns 1.0, for the reward probe."""
    return " ".join(f"word{number}" for number in range(row["words"]))


def _question(row: dict) -> str:
    given = row["responses_create_params"]["input"]
    return given if isinstance(given, str) else given[-1]["content"]
