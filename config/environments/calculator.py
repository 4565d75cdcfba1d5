"""Example of an environment with a tool and several turns: a product that is to be worked out with a calculator."""

import re

LONGEST = 20


class Calculator:
    """TRL's protocol: `reset` begins a rollout of a row, the other public methods are the tools.

    An object plays one rollout, and may keep in its attributes what the policy has done so far.
    """

    tool_timeout = 5.0  # seconds that a call may take

    def reset(self, **row: object) -> None:
        """Begin; text that is returned would be added to the prompt."""
        self.calls = 0

    def calculate(self, expression: str) -> str:
        """Work out a sum, difference or product of whole numbers.

        Args:
            expression: Two whole numbers with +, - or * between them, such as 12*34.

        Returns:
            The result.
        """
        self.calls += 1
        if len(expression) > LONGEST or not (found := re.fullmatch(r"(\d+)([-+*])(\d+)", expression)):
            raise ValueError(f"{expression[:LONGEST]!r} is not two whole numbers with +, - or * between them")
        first, sign, second = int(found[1]), found[2], int(found[3])
        return str({"+": first + second, "-": first - second, "*": first * second}[sign])


def verify(row: dict, response: str) -> float:
    """1.0 where what the policy says last is the row's answer, else 0.0."""
    return float(response.strip() == row["expected_answer"])


def good_answer(row: dict) -> str:
    """The answer that earns 1.0, for the reward probe."""
    return row["expected_answer"]
