"""Settings under which NeMo-RL silently trains something else.

Read in the sources of the pinned releases (docs/traps.md); NeMo-RL compares vocabularies of teacher and student in
run_distillation.py alone. The merge of adapters over a tied head was tried on a CPU, on a checkpoint saved by
Automodel's code.
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from pathlib import Path

from jinja2 import TemplateError

from scripts.backends.nemo_rl.checks.context import StageContext, chat_format_of, of_loop
from scripts.backends.nemo_rl.export import trains_adapters
from scripts.backends.nemo_rl.loops import Distillation, RoutedDistillation
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.finding import Finding
from scripts.model.generation_settings import settings_asked
from scripts.model.hugging_face import config_of
from scripts.recipe.strict import nearest
from scripts.records import Manifest, read_if_there
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import GENERATION, ChatFormat, chat_template_of, compiled_template
from scripts.stage.stage import Stage

DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"
RATES = ("policy.optimizer", "policy.scheduler")
PREFIX_CACHE_KEY = "policy.generation.vllm_cfg.enable_prefix_caching"
SPECULATION_KEY = "policy.generation.vllm_kwargs.speculative_config"
DEFAULTS_KEY, OF_VLLM = "policy.generation.vllm_kwargs.generation_config", "vllm"
TAKEN_BY_SERVER = ("repetition_penalty", "min_p", "max_new_tokens")
CPU_OFFLOAD_KEY = "policy.megatron_cfg.optimizer.optimizer_cpu_offload"
TRUNCATE = "truncate_history_thinking"
POLICY_SERVER = "policy_model"
TEMPLATE_KEY = f"env.nemo_gym.{POLICY_SERVER}.responses_api_models.vllm_model.chat_template_kwargs.{TRUNCATE}"
FORCED, BOUND = "loss_fn.force_on_policy_ratio", "grpo.seq_logprob_error_threshold"
THOUGHT = "what was thought in an earlier turn"
TURNS = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
)


def check_resume(context: StageContext) -> Iterator[Finding]:
    """Find a reference that DTensor v2 copies after loading the resumed checkpoint, and an optimizer that is not saved.

    Where the last step alone is saved, nothing is resumed.
    """
    stage, last = context.settings, context.settings.max_num_steps
    if last is not None and stage.checkpointing.save_period >= last:
        return
    penalty = context.setting(stage.loop.penalty, 0)
    dtensor = context.setting("policy.dtensor_cfg.enabled") and context.setting("policy.dtensor_cfg._v2")
    if dtensor and penalty:
        yield context.warning(
            66,
            f"{stage.loop.penalty} is {penalty} and policy.dtensor_cfg._v2 is on: a resume takes the "
            "checkpoint that it goes on from as the reference, not the model that the stage began with; let "
            "checkpointing.save_period be max_num_steps, so that what is interrupted begins anew, or train by Megatron",
        )
    if context.setting("checkpointing.save_optimizer") is False:
        yield context.error(
            91, "checkpointing.save_optimizer is false: a resume would go on with an empty optimizer; make it true"
        )


def check_optimizer(context: StageContext) -> Iterator[Finding]:
    """Find an optimizer that copies the weights to the CPU before the weights are loaded."""
    is_offloaded = context.setting("policy.megatron_cfg.enabled") and context.setting(CPU_OFFLOAD_KEY)
    if is_offloaded and "offloads_optimizer" not in context.release.can:
        yield context.error(
            68,
            f"{CPU_OFFLOAD_KEY} is on: the first step would go out from random weights, not the model's; make it false",
        )


def check_continuing(context: StageContext) -> Iterator[Finding]:
    """Find a release that keeps the loader's position, and an optimizer that keeps the parent's rate."""
    for before in context.stage.node.continued:
        yield from _of_continuing(context, replace(context.stage, name=before.name))


def _of_continuing(context: StageContext, before: Stage) -> Iterator[Finding]:
    """Find settings against going on with the training of the stage before."""
    if "begins_data_anew" not in context.release.can:
        says = f"continues: {context.release.name} would go on at the parent's row of the data; name a later release"
        yield context.error(78, says)
    if context.setting("policy.megatron_cfg.enabled"):
        key = "policy.megatron_cfg.scheduler.override_opt_param_scheduler"
        if not context.setting(key):
            yield context.error(92, f"continues: the optimizer would keep the parent's rate; set {key}: true")
        return
    parent = StageContext(**vars(runtime_of(before.recipe, before.name, context.site)), stage=before)
    for key in RATES:
        if context.setting(key) != parent.setting(key):
            says = f"continues: {key} is not {before.name}'s, whose rate the optimizer keeps without Megatron"
            yield context.error(92, f"{says}; set it to {parent.setting(key)}")


def check_loss(context: StageContext) -> Iterator[Finding]:
    """Find a term of the loss that no data reach."""
    for name in context.settings.loop.idle_losses:
        weight = context.setting(f"loss_fn.{name}")
        if weight:
            yield context.error(
                93,
                f"loss_fn.{name} is {weight}, but GRPO gives the loss no rewards: the term is 0 at every step; leave "
                "it out",
            )


@of_loop(RoutedDistillation)
def check_advantage(context: StageContext) -> Iterator[Finding]:
    """Find a distillation's advantage without the student's log-probability."""
    if context.setting(FORCED) and context.setting(BOUND) is None:
        yield context.error(
            81,
            f"{FORCED} is on and {BOUND} is not set: the student's log-probability would be left out of the advantage; "
            f"set {BOUND}, or {FORCED} to false",
        )


def check_balancing(context: StageContext) -> Iterator[Finding]:
    """Find losses of experts that not all ranks of a pipeline record."""
    megatron, stages = "policy.megatron_cfg", context.parallel_size("pipeline_model")
    kinds = context.setting(f"{megatron}.moe_router_load_balancing_type")
    weighs = context.setting(f"{megatron}.moe_aux_loss_coeff") != 0 and "aux_loss" in str(kinds)
    hangs = weighs and stages > 1 and "awaits_all_stages" not in context.release.can
    if hangs and context.setting(f"{megatron}.enabled"):
        yield context.warning(
            98,
            f"{megatron}.moe_router_load_balancing_type is {kinds} on a pipeline of {stages}: with experts in some of "
            "its parts alone, the sum of their losses waits for ever; set moe_aux_loss_coeff to 0, or PP to 1",
        )


def check_prefix_cache(context: StageContext) -> Iterator[Finding]:
    """Find a prefix cache of vLLM that outlives the weights, or lies beside tokens drafted by a hybrid with Mamba."""
    caches = context.setting(PREFIX_CACHE_KEY)
    if not context.upstream or caches is False:
        return
    if context.settings.is_asynchronous and context.setting("policy.generation.backend") != "megatron":
        yield context.warning(
            67,
            f"{PREFIX_CACHE_KEY} is {'on' if caches else 'not set, which is on'}: what vLLM has cached of prompts and "
            "turns outlives the weights that computed it; hold gen_kl_error by a gate, or make it false, and each turn "
            "is computed anew",
        )
    if context.setting(SPECULATION_KEY) and _is_hybrid(context):
        yield context.error(
            83,
            f"{SPECULATION_KEY} is set and {PREFIX_CACHE_KEY} is not false: vLLM continues from wrong Mamba states, "
            "and rollouts are silently wrong (vLLM issue 53912); add the override "
            f"{PREFIX_CACHE_KEY}=false, as super_launch.sh does",
        )


def check_chat_template(context: StageContext) -> Iterator[Finding]:
    """Find a chat template that drops the thoughts of earlier turns from a rollout."""
    if "nemo_gym" not in context.settings.entry or context.model is None:
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


def check_generation_settings(context: StageContext) -> Iterator[Finding]:
    """Find settings of the start's generation_config.json by which vLLM's server samples rollouts beside the recipe's.

    NeMo-RL's requests name temperature, top_p and top_k alone; what they leave out, the server takes from the file.
    """
    if "nemo_gym" not in context.settings.entry or context.model is None:
        return
    is_by_vllm = context.setting("policy.generation.backend", "vllm") == "vllm"
    asked = {name: value for name, value in settings_asked(context.model).items() if name in TAKEN_BY_SERVER}
    if asked and is_by_vllm and context.setting(DEFAULTS_KEY) != OF_VLLM:
        settings = " and ".join(f"{name} {value}" for name, value in asked.items())
        *sections, last = DEFAULTS_KEY.split(".")
        remedy = f"{': {'.join(sections)}: {{{last}: {OF_VLLM}{'}' * len(sections)}"
        yield context.warning(
            107,
            f"{context.model}: its {GENERATION} asks for {settings}, which vLLM's server would follow in rollouts, "
            f"while the update does not; add: {{{remedy}}}",
        )


def check_adapters(context: StageContext) -> Iterator[Finding]:
    """Find adapters that are left out of training, or that no export can merge."""
    section, other = (MEGATRON, DTENSOR) if context.setting("policy.megatron_cfg.enabled") else (DTENSOR, MEGATRON)
    if context.setting(f"{other}.enabled"):
        yield context.error(76, f"{other}.enabled is on, but that is not what trains; say it in {section}")
    if not trains_adapters(context.setting("policy") or {}):
        return
    if "merges_adapters" not in context.release.can:
        yield context.error(15, f"{section}.enabled is on, but {context.release.name} has no peft to merge them by")
    elif section == MEGATRON and context.release.converter.adapters is None:
        yield context.error(15, f"{section}.enabled is on, for which {context.release.name} has no converter")
    head, folder = "lm_head" if section == DTENSOR else "output_layer", context.model
    has_config = folder is not None and (folder / "config.json").is_file()
    if has_config and config_of(folder).get("tie_word_embeddings") and _adapts(context, section, head):
        also = " with match_all_linear: false" if section == DTENSOR else ""
        yield context.error(
            76,
            f"{section} lays adapters over {head}, which is {folder}'s embedding too: merged they would change what it "
            f"reads, and vLLM leaves them out; say exclude_modules: ['{head}']{also}",
        )


@of_loop(RoutedDistillation)
def check_routes(context: StageContext) -> Iterator[Finding]:
    """Find environments of the rows that no teacher has, and environments without rows that hide a misspelt name."""
    splits = read_if_there(context.stage.manifest, Manifest)
    if splits is None:
        return
    names, of = splits["train"].get("environments", {}).keys(), context.settings.distillation.get("of", {}).keys()
    role_of, teachers = context.settings.teaching.role_of, context.settings.teachers
    for name in sorted(name for name in names if role_of(name, teachers) is None):
        yield context.error(79, f"distillation.of has no teacher of {name}, an environment of its rows; name a role")
    if context.settings.default_teacher is None:
        return
    for name in sorted(of - names):
        near = nearest(name, names)
        yield context.error(
            79,
            f"distillation.of.{name}: no row has this environment, and distillation.default would teach a misspelt "
            f"one{near}",
        )
    if not names - of:
        yield context.error(
            79, "distillation.default teaches no environment of its rows, and its nodes would idle; leave it out"
        )


def check_formats(context: StageContext) -> Iterator[Finding]:
    """Find teachers who read the student's tokens or turns otherwise, or fewer of them."""
    stage, length = context.stage, context.settings.max_length
    student = chat_format_of(stage) if stage.role_exports else None
    for role, folder in stage.role_exports.items():
        if student is None or not (folder / "config.json").is_file():
            continue
        found = student.changes(ChatFormat.of(folder))
        if stage.settings.template_change:
            found = [change for change in found if change.startswith("the vocabulary")]
        sizes = [config_of(each).get("vocab_size") for each in (student.folder, folder)]
        if context.settings.loop.compares_vocabularies and sizes[0] != sizes[1]:
            found.append(f"vocab_size of config.json ({sizes[0]}, now {sizes[1]})")
        if found:
            yield context.error(
                80,
                f"{role} reads otherwise than the student: {'; '.join(found)}. It would score other tokens, or turns "
                "that it never learnt; name a teacher of the same vocabulary and template, or, for all but the "
                "vocabulary, say template_change: true",
            )
        reads = [config_of(folder).get("max_position_embeddings"), context.setting("teacher.max_total_sequence_length")]
        least = min((size for size in reads if isinstance(size, int)), default=length)
        if least < length:
            yield context.error(
                80,
                f"{role} reads {least} tokens, but policy.max_total_sequence_length is {length}; lower that, or name a "
                "teacher who reads as many",
            )


@of_loop(RoutedDistillation)
def check_kind_of_teachers(context: StageContext) -> Iterator[Finding]:
    """Find teachers who are not Megatron's."""
    if context.training_nodes > 0 and context.setting("policy.dtensor_cfg.enabled"):
        yield context.error(23, "policy.dtensor_cfg.enabled is on, but NeMo-RL's teachers (MOPD) are Megatron's")


@of_loop(Distillation)
def check_groups(context: StageContext) -> Iterator[Finding]:
    """Find GPUs of a teacher that the parallel groups do not fill."""
    if context.training_nodes <= 0:
        return
    nodes, sizes = context.settings.loop.groups_of_teacher(context)
    gpus, group = nodes * context.site.slurm.gpus_per_node, prod(sizes)
    if gpus % group:
        yield context.error(18, f"a teacher has {gpus} GPUs, no multiple of TP x CP x PP = {group}")


def _is_hybrid(context: StageContext) -> bool:
    """Return whether the model is a Nemotron-H; where no config is at hand, whether a name says Nemotron."""
    name = context.stage.recipe.model.name
    for folder in filter(None, (context.model, Path(name))):
        if (folder / "config.json").is_file():
            return "nemotronh" in str(config_of(folder).get("model_type")).replace("_", "").lower()
    return "nemotron" in f"{name} {context.settings.config}".lower()


def _adapts(context: StageContext, section: str, layer: str) -> bool:
    """Return whether a layer gets adapters by the section's lists."""
    targets, excluded = (context.setting(f"{section}.{name}_modules") for name in ("target", "exclude"))
    if section == DTENSOR and not targets and not excluded and not context.setting(f"{section}.match_all_linear"):
        targets = ["*_proj"]
    patterns = targets or excluded or []
    is_named = any(fnmatch(layer, pattern) or layer.endswith(f".{pattern}") for pattern in patterns)
    return is_named == bool(targets)


def _forgets(model: Path, **options: bool) -> bool:
    """Return whether the chat template drops thoughts before the last question."""
    template = chat_template_of(model)
    if template is None:
        return False
    try:
        with bounded(f"{model}: the chat template"):
            text = compiled_template(template, model).render(messages=TURNS, add_generation_prompt=True, **options)
    except TemplateError:
        return False
    return "two" in text and THOUGHT not in text
