"""Traps of a NeMo-RL stage that files show before any node is asked for.

A check yields findings of a stage: a trap by number (docs/traps.md), the value and the fix. A new check is a function
`check_...` in a module here.
"""

from collections.abc import Callable, Iterator

from scripts.backends.nemo_rl.checks import places, silent, sums
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.protocol import Finding
from scripts.recipe.site import Site
from scripts.stage.stage import Stage

CHECKS: list[Callable[[StageContext], Iterator[Finding]]] = [
    check for module in (places, silent, sums) for name, check in vars(module).items() if name.startswith("check_")
]


def findings(stage: Stage, site: Site) -> list[Finding]:
    """Return all findings of a stage; findings of rows only where the rows are there."""
    for section in ("slurm", "nemo_rl"):
        if getattr(site, section) is None:
            return [Finding(stage.name, 23, f"site {site.name} has no section {section}, which NeMo-RL needs")]
    context = StageContext(**vars(runtime_of(stage.recipe, stage.name, site)), stage=stage)
    return [finding for check in CHECKS for finding in check(context)]
