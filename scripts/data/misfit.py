"""Why a published row is no row of a blend."""


class Misfit(ValueError):
    """Why a published row is no row of the blend, and the column to blame, if any."""

    def __init__(self, problem: str, column: str | None = None) -> None:
        super().__init__(f"column {column}: {problem}" if column else problem)
