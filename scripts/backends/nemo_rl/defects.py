"""Settings under which a release of NeMo-RL trains something else than what it is told, and says nothing.

All of them were found by reading the sources of the pinned releases; docs/traps.md says which release has which.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scripts.backends.nemo_rl.patient import Finding, Patient

PREFIX_CACHE = "policy.generation.vllm_cfg.enable_prefix_caching"
CPU_OFFLOAD = "policy.megatron_cfg.optimizer.optimizer_cpu_offload"
KEEPING = "truncate_history_thinking"
MODEL = "policy_model"
OF_THE_POLICY = f"env.nemo_gym.{MODEL}.responses_api_models.vllm_model.chat_template_kwargs.{KEEPING}"
THOUGHT = "what was thought in an earlier turn"
TURNS = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
)


def check_reference(patient: Patient) -> Iterator[Finding]:
    """DTensor's second version copies the reference after it has loaded the checkpoint that it resumes from."""
    stage = patient.stage
    section = "loss_fn" if stage.algorithm == "grpo" else stage.algorithm
    penalty = patient.told(f"{section}.reference_policy_kl_penalty", 0)
    dtensor = patient.told("policy.dtensor_cfg.enabled") and patient.told("policy.dtensor_cfg._v2")
    saves_once = stage.max_num_steps is not None and stage.checkpointing.save_period >= stage.max_num_steps
    if dtensor and penalty and not saves_once:
        yield patient.finding(
            66,
            f"{section}.reference_policy_kl_penalty is {penalty} and policy.dtensor_cfg._v2 is on: a resume takes the "
            "checkpoint that it goes on from as the reference, not the model that the stage began with; let "
            "checkpointing.save_period be max_num_steps, so that what is interrupted begins anew, or train by Megatron",
            stops=False,
        )


def check_prefix_cache(patient: Patient) -> Iterator[Finding]:
    """vLLM's cache of prefixes is not emptied when weights change under the responses that are being generated."""
    if (
        not (patient.config and patient.stage.is_asynchronous)
        or patient.told("policy.generation.backend") == "megatron"
    ):
        return
    caches = patient.told(PREFIX_CACHE)
    if caches is not False:
        yield patient.finding(
            67,
            f"{PREFIX_CACHE} is {'on' if caches else 'not set, which is on'}: what vLLM has cached of prompts and "
            "turns outlives the weights that computed it; hold gen_kl_error by a gate, or make it false, and each turn "
            "is computed anew",
            stops=False,
        )


def check_optimizer_offload(patient: Patient) -> Iterator[Finding]:
    """The optimizer's copies of the weights on the CPU are made before the weights are loaded."""
    if patient.told("policy.megatron_cfg.enabled") and patient.told(CPU_OFFLOAD):
        yield patient.finding(
            68,
            f"{CPU_OFFLOAD} is on: the first step would go out from random weights, not the model's; make it false",
        )


def check_chat_template(patient: Patient) -> Iterator[Finding]:
    """What the model thought in earlier turns must still be there when a rollout's next turn is asked for."""
    if not patient.is_of_gym or patient.model is None:
        return
    said = patient.values("policy", KEEPING) | patient.values("env", KEEPING)
    keeps = any(value is False for place, value in said.items() if not place.startswith("nemo_gym") or MODEL in place)
    options = {KEEPING: False} if keeps else {}
    if _forgets(patient.model, **options):
        heeds = not _forgets(patient.model, **{KEEPING: False})
        instead = f"set {OF_THE_POLICY} to false" if heeds else f"use another, {KEEPING}: false does not help"
        yield patient.finding(
            64,
            f"{patient.model}: its chat template leaves out what was thought in earlier turns, which NeMo-RL trains "
            f"on: a rollout of several user turns fails or is cut wrongly; {instead}",
            stops=False,
        )


CHECKS = (check_reference, check_prefix_cache, check_optimizer_offload, check_chat_template)


def _forgets(model: Path, **options: bool) -> bool:
    """Whether its chat template renders a conversation without the thoughts of the turns before the last question."""
    template = _chat_template(model)
    if template is None:
        return False
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        text = environment.from_string(template).render(messages=TURNS, add_generation_prompt=True, **options)
    except TemplateError:
        return False
    return "two" in text and THOUGHT not in text


def _refuse(why: str) -> None:
    raise TemplateError(why)


def _chat_template(model: Path) -> str | None:
    """A model's chat template; a file of its own counts more than the tokenizer's config."""
    own, config = model / "chat_template.jinja", model / "tokenizer_config.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None
