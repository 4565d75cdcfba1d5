"""Traps of a NeMo-RL stage that goes on with its parent's optimizer."""

from collections.abc import Iterator

from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.protocol import Finding
from scripts.stage.stage import Stage

RATES = ("policy.optimizer", "policy.scheduler")


def check_continuing(context: StageContext) -> Iterator[Finding]:
    """Find a release that keeps the loader's position, and an optimizer that keeps the parent's rate."""
    if context.settings.continues is None:
        return
    if "begins_data_anew" not in context.release.can:
        says = f"continues: {context.release.name} would go on at the parent's row of the data; name a later release"
        yield context.error(78, says)
    if context.setting("policy.megatron_cfg.enabled"):
        key = "policy.megatron_cfg.scheduler.override_opt_param_scheduler"
        if not context.setting(key):
            yield context.error(92, f"continues: the optimizer would keep the parent's rate; set {key}: true")
        return
    stage = Stage(context.stage.recipe, context.stage.results, context.settings.continues)
    parent = StageContext(**vars(runtime_of(stage.recipe, stage.name, context.site)), stage=stage)
    for key in RATES:
        if context.setting(key) != parent.setting(key):
            says = f"continues: {key} is not {stage.name}'s, whose rate the optimizer keeps without Megatron"
            yield context.error(92, f"{says}; set it to {parent.setting(key)}")
