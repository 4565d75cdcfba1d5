"""Settings under which a release of NeMo-RL trains something else than what it is told, and says nothing.

All of them were found by reading the sources of the pinned releases; docs/traps.md says which release has which.
"""

from collections.abc import Iterator
from pathlib import Path

from jinja2 import TemplateError

from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.protocol import Finding
from scripts.rows.chat_format import chat_template_of, compiled_template

PREFIX_CACHE_KEY = "policy.generation.vllm_cfg.enable_prefix_caching"
CPU_OFFLOAD_KEY = "policy.megatron_cfg.optimizer.optimizer_cpu_offload"
TRUNCATE = "truncate_history_thinking"
POLICY_SERVER = "policy_model"
TEMPLATE_KEY = f"env.nemo_gym.{POLICY_SERVER}.responses_api_models.vllm_model.chat_template_kwargs.{TRUNCATE}"
THOUGHT = "what was thought in an earlier turn"
TURNS = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
)


def check_reference(context: StageContext) -> Iterator[Finding]:
    """DTensor's second version copies the reference after it has loaded the checkpoint that it resumes from."""
    stage = context.settings
    section = "loss_fn" if stage.algorithm == "grpo" else stage.algorithm
    penalty = context.setting(f"{section}.reference_policy_kl_penalty", 0)
    dtensor = context.setting("policy.dtensor_cfg.enabled") and context.setting("policy.dtensor_cfg._v2")
    saves_once = stage.max_num_steps is not None and stage.checkpointing.save_period >= stage.max_num_steps
    if dtensor and penalty and not saves_once:
        yield context.warning(
            66,
            f"{section}.reference_policy_kl_penalty is {penalty} and policy.dtensor_cfg._v2 is on: a resume takes the "
            "checkpoint that it goes on from as the reference, not the model that the stage began with; let "
            "checkpointing.save_period be max_num_steps, so that what is interrupted begins anew, or train by Megatron",
        )


def check_prefix_cache(context: StageContext) -> Iterator[Finding]:
    """vLLM's cache of prefixes is not emptied when weights change under the responses that are being generated."""
    generates_by_vllm = context.config and context.setting("policy.generation.backend") != "megatron"
    caches = context.setting(PREFIX_CACHE_KEY)
    if generates_by_vllm and context.settings.is_asynchronous and caches is not False:
        yield context.warning(
            67,
            f"{PREFIX_CACHE_KEY} is {'on' if caches else 'not set, which is on'}: what vLLM has cached of prompts and "
            "turns outlives the weights that computed it; hold gen_kl_error by a gate, or make it false, and each turn "
            "is computed anew",
        )


def check_optimizer_offload(context: StageContext) -> Iterator[Finding]:
    """The optimizer's copies of the weights on the CPU are made before the weights are loaded."""
    if "offloads_optimizer" in context.release.can:
        return
    if context.setting("policy.megatron_cfg.enabled") and context.setting(CPU_OFFLOAD_KEY):
        yield context.error(
            68,
            f"{CPU_OFFLOAD_KEY} is on: the first step would go out from random weights, not the model's; make it false",
        )


def check_chat_template(context: StageContext) -> Iterator[Finding]:
    """What the model thought in earlier turns must still be there when a rollout's next turn is asked for."""
    if not context.uses_gym or context.model is None:
        return
    stated = context.values("policy", TRUNCATE) | context.values("env", TRUNCATE)
    of_policy = (stated[key] for key in stated if not key.startswith("nemo_gym") or POLICY_SERVER in key)
    keeps = any(value is False for value in of_policy)
    options = {TRUNCATE: False} if keeps else {}
    if _forgets(context.model, **options):
        heeds = not _forgets(context.model, **{TRUNCATE: False})
        instead = f"set {TEMPLATE_KEY} to false" if heeds else f"use another, {TRUNCATE}: false does not help"
        yield context.warning(
            64,
            f"{context.model}: its chat template leaves out what was thought in earlier turns, which NeMo-RL trains "
            f"on: a rollout of several user turns fails or is cut wrongly; {instead}",
        )


def _forgets(model: Path, **options: bool) -> bool:
    """Whether its chat template renders a conversation without the thoughts of the turns before the last question."""
    template = chat_template_of(model)
    if template is None:
        return False
    try:
        text = compiled_template(template, model).render(messages=TURNS, add_generation_prompt=True, **options)
    except TemplateError:
        return False
    return "two" in text and THOUGHT not in text
