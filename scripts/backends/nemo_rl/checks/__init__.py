"""Traps of a NeMo-RL stage that files show before any node is asked for.

A check yields findings of a stage: a trap by number (docs/traps.md), the value and the fix. A new check is a function
in a module here, named in CHECKS.
"""

from collections.abc import Callable, Iterator

from scripts.backends.nemo_rl.checks import places, silent, sums
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.protocol import Finding
from scripts.recipe.site import Site
from scripts.stage.stage import Stage

CHECKS: tuple[Callable[[StageContext], Iterator[Finding]], ...] = (
    sums.check_cohorts,
    sums.check_checkpoints,
    places.check_conversion,
    silent.check_adapters,
    places.check_model,
    places.check_paths,
    places.check_checkout,
    places.check_images,
    sums.check_environments,
    sums.check_parallelism,
    sums.check_preferences,
    sums.check_rows_and_steps,
    places.check_import,
    places.check_hub,
    silent.check_reference,
    silent.check_prefix_cache,
    silent.check_optimizer_offload,
    silent.check_chat_template,
)


def findings(stage: Stage, site: Site) -> list[Finding]:
    """Return all findings of a stage; findings of rows only where the rows are there."""
    for section in ("slurm", "nemo_rl"):
        if getattr(site, section) is None:
            return [Finding(stage.name, 23, f"site {site.name} has no section {section}, which NeMo-RL needs")]
    context = StageContext(**vars(runtime_of(stage.recipe, stage.name, site)), stage=stage)
    return [finding for check in CHECKS for finding in check(context)]
