"""Caches that a NeMo-RL stage shares with other nodes and other runs: half-made, locked for ever, on a wrong disk."""

import os
from collections.abc import Iterator
from pathlib import Path

from scripts.backends.nemo_rl.checkpoints import missing_file
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.protocol import Finding

NODE_CACHES = {
    "TRITON_CACHE_DIR": "a rank that meets another's half-written kernel dies, and the rest wait for it",
    "TORCHINDUCTOR_CACHE_DIR": "a rank that meets another's half-written kernel dies, and the rest wait for it",
    "TORCH_EXTENSIONS_DIR": "a lock that a killed build has left there makes every later one wait for ever",
    "TMPDIR": "sockets of Ray and vLLM cannot lie there",
    "RAY_TMPDIR": "sockets of Ray cannot lie there",
}


def check_import(context: StageContext) -> Iterator[Finding]:
    """NeMo-RL imports a model once and knows it by its path alone, be it half imported or changed since."""
    model, cache = context.model, context.environment.get("NRL_MEGATRON_CHECKPOINT_DIR")
    if model is None or not cache:
        return
    imported = Path(cache, f"model_{str(model).replace('/', '_')}", "iter_0000000")
    if not imported.exists():
        return
    if missing := missing_file(imported):
        yield context.error(
            13, f"{imported}: has no {missing}; an import that was killed? delete it, and NeMo-RL imports again"
        )
    elif max((file.stat().st_mtime for file in model.glob("*")), default=0) > imported.stat().st_mtime:
        yield context.warning(
            13, f"{model}: has changed since NeMo-RL imported it; delete {imported.parent} or use a new path"
        )


def check_hub(context: StageContext) -> Iterator[Finding]:
    """Judges and datasets are fetched from the hub by compute nodes unless they are cached."""
    if _hub(context):
        return
    wanted = ["its judge models"] if context.settings.reward == "judge" else []
    if context.settings.parent is None and not context.stage.recipe.model.name.startswith("/"):
        wanted.append(f"the model {context.stage.recipe.model.name}")
    for what in wanted:
        yield context.error(
            41, f"{what} would come from the hub, and no HF_HOME (site's environment) says where that is cached"
        )


def check_node_caches(context: StageContext) -> Iterator[Finding]:
    """Some caches are made for one node and break where several write them."""
    shared = [context.nemo_rl.cache, str(context.stage.results.absolute()), *context.nemo_rl.checkouts.values()]
    shared += [hub] if (hub := _hub(context)) else []
    variables = context.site.environment | context.environment
    for name in sorted(variables.keys() & NODE_CACHES):
        if any(Path(variables[name]).is_relative_to(folder) for folder in shared):
            yield context.warning(
                74,
                f"{name} is {variables[name]}, which all nodes share: {NODE_CACHES[name]}; put it into each "
                "node's /tmp",
            )


def _hub(context: StageContext) -> str | None:
    """Where models of the hub are cached."""
    return context.site.environment.get("HF_HOME") or os.environ.get("HF_HOME")
