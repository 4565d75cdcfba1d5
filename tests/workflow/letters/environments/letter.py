"""Rewards the letter a."""


def verify(row: dict, response: str) -> float:
    """1.0 where there is one."""
    return float("a" in response)


def good_answer(row: dict) -> str:
    """It earns 1.0."""
    return "a"
