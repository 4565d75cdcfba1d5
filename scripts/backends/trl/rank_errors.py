"""What ended the processes that train together, and which of them is the cause."""

import re
from pathlib import Path

from scripts.errors import CutOffError, UserError


class RankError(Exception):
    """What ended a rank: a message that a person is meant to read, or else the traceback.

    `cut_off`: the message tells of something from outside, and the next attempt may go well. `follows`: another rank
    is gone, and what is told of this one follows from that.
    """

    def __init__(
        self, rank: int, host: str, text: str, for_user: bool, cut_off: bool = False, follows: bool = False
    ) -> None:
        super().__init__(rank, host, text, for_user, cut_off, follows)
        self.rank, self.host, self.text, self.for_user = rank, host, text, for_user
        self.cut_off, self.follows = cut_off, follows


def explain(failures: dict[int, Exception], place: Path) -> UserError:
    """What went wrong, by rank, told once: the cause rather than what followed from it on the other ranks.

    What is no RankError says that the process is gone; ``rank_N`` in `place` names the host of a rank.
    """
    explained = {rank: cause for rank, cause in failures.items() if isinstance(cause, RankError) and cause.for_user}
    gone = {rank: cause for rank, cause in failures.items() if not isinstance(cause, RankError)}
    own = {rank: cause for rank, cause in failures.items() if isinstance(cause, RankError) and not cause.follows}
    rank, cause = min((explained or gone or own or failures).items())
    if rank in explained:
        return (CutOffError if cause.cut_off else UserError)(f"{cause.text} (rank {rank} on {cause.host})")
    if rank in gone:
        return CutOffError(
            f"rank {rank} on {_host_of(rank, place)} is gone, killed or out of memory: {_in_short(cause)}"
        )
    return UserError(f"rank {rank} on {cause.host} failed:\n{cause.text.rstrip()}")


def _host_of(rank: int, place: Path) -> str:
    file = place / f"rank_{rank}"
    return file.read_text(encoding="utf-8") if file.exists() else "an unknown host"


def _in_short(error: Exception) -> str:
    """Of what Ray says of a lost process, the sentences that say how."""
    found = re.search(r"^The actor (?:is dead|died) because .*?(?= Some common causes|$)", str(error), re.MULTILINE)
    return found[0] if found else str(error)
