"""What can be seen of a NeMo-RL stage before any node is asked for.

A check is a function of the stage's context; each finding names a trap (by its number in docs/traps.md), the value and
the fix. Nothing is read but files. A new check is written into one of the modules here and added to CHECKS.
"""

from collections.abc import Callable, Iterator

from scripts.backends.nemo_rl.checks import caches, defects, lora, recipe, site
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.protocol import Finding
from scripts.recipe.site import Site
from scripts.stage.stage import Stage

CHECKS: tuple[Callable[[StageContext], Iterator[Finding]], ...] = (
    recipe.check_cohorts,
    recipe.check_checkpoints,
    site.check_conversion,
    lora.check_adapters,
    site.check_model,
    site.check_paths,
    site.check_checkout,
    site.check_images,
    recipe.check_environments,
    recipe.check_parallelism,
    recipe.check_preferences,
    recipe.check_rows_and_steps,
    caches.check_import,
    caches.check_hub,
    caches.check_node_caches,
    defects.check_reference,
    defects.check_prefix_cache,
    defects.check_optimizer_offload,
    defects.check_chat_template,
)


def findings(stage: Stage, site: Site) -> list[Finding]:
    """Everything that is found of a stage; of its rows only when they are there."""
    for section in ("slurm", "nemo_rl"):
        if getattr(site, section) is None:
            return [Finding(stage.name, 23, f"site {site.name} has no section {section}, which NeMo-RL needs")]
    context = StageContext(**vars(runtime_of(stage.recipe, stage.name, site)), stage=stage)
    return [finding for check in CHECKS for finding in check(context)]
