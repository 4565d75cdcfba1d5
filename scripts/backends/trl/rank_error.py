"""How the processes of a training end, and which of their failures is the cause."""

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import CutOffError, LongError, UserError


@dataclass(eq=False)
class RankError(Exception):
    """The end of a rank: a message for people, or a traceback; made by positional arguments, to be pickled.

    `cut_off`: the cause lies outside, and the next attempt may succeed. `follows`: a consequence of another rank's
    loss.
    """

    rank: int
    host: str
    text: str
    for_user: bool
    cut_off: bool = False
    follows: bool = False


def explain(failures: dict[int, Exception], place: Path) -> UserError:
    """Return the cause among the ranks' failures, once, rather than its consequences.

    A failure that is no RankError means a lost process; ``rank_N`` in `place` names its host.
    """
    explained = {rank: cause for rank, cause in failures.items() if isinstance(cause, RankError) and cause.for_user}
    gone = {rank: cause for rank, cause in failures.items() if not isinstance(cause, RankError)}
    own = {rank: cause for rank, cause in failures.items() if isinstance(cause, RankError) and not cause.follows}
    rank, cause = min((explained or gone or own or failures).items())
    if rank in explained:
        return (CutOffError if cause.cut_off else UserError)(f"{cause.text} (rank {rank} on {cause.host})")
    if rank in gone:
        file = place / f"rank_{rank}"
        host = file.read_text(encoding="utf-8") if file.exists() else "an unknown host"
        told = re.search(r"^The actor (?:is dead|died) because .*?(?= Some common causes|$)", str(cause), re.MULTILINE)
        how = told[0] if told else " ".join(str(cause).split())[:300]
        return CutOffError(f"rank {rank} on {host} is gone, killed or out of memory: {how}")
    return LongError(f"rank {rank} on {cause.host} failed:\n{cause.text.rstrip()}")
