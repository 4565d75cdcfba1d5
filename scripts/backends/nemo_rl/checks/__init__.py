"""Traps of a NeMo-RL stage that files show before any node is asked for.

A check yields findings of a stage: a trap by number (docs/traps.md), the value and the fix. A new check is a function
`check_...` in a module here.
"""

from collections.abc import Callable, Iterator

from scripts.backends.nemo_rl.checks import places, silent, sums
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.finding import Finding
from scripts.stage.candidate import Candidate

CHECKS: list[Callable[[StageContext], Iterator[Finding]]] = [
    check for module in (places, silent, sums) for name, check in vars(module).items() if name.startswith("check_")
]


def check_traps(candidate: Candidate) -> Iterator[Finding]:
    """Yield all findings of a stage; findings of rows only where the rows are there."""
    stage, site = candidate.stage, candidate.site
    if site is None:
        yield candidate.stops(f"stage {stage.name} is NeMo-RL's: name the site as well (--site)")
        return
    for section in ("slurm", "nemo_rl"):
        if getattr(site, section) is None:
            yield candidate.stops(f"site {site.name} has no section {section}, which NeMo-RL needs", trap=23)
            return
    context = StageContext(**vars(runtime_of(stage.recipe, stage.name, site)), stage=stage)
    for check in CHECKS:
        yield from check(context)
