"""Teachers who would silently teach something else, or not what their environments are.

Read in the sources of v0.7.0 and main (docs/traps.md); NeMo-RL compares vocabularies in run_distillation.py alone.
"""

from collections.abc import Iterator
from math import prod

from scripts.backends.nemo_rl.checks.context import StageContext, chat_format_of
from scripts.backends.protocol import Finding
from scripts.model.hugging_face import config_of
from scripts.recipe.strict import nearest
from scripts.records import Manifest, read_if_there
from scripts.rows.chat_format import ChatFormat

TEACHER = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg"
GROUPS = ("tensor_model", "context", "pipeline_model")
FORCED, BOUND = "loss_fn.force_on_policy_ratio", "grpo.seq_logprob_error_threshold"


def check_routes(context: StageContext) -> Iterator[Finding]:
    """Find environments of the rows that no teacher has, and environments without rows that hide a misspelt name."""
    splits = read_if_there(context.stage.manifest, Manifest)
    if splits is None or not context.settings.routes:
        return
    names, of = splits["train"].get("environments", {}).keys(), context.settings.distillation.get("of", {}).keys()
    for name in sorted(name for name in names if context.settings.teacher_of(name) is None):
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


def check_advantage(context: StageContext) -> Iterator[Finding]:
    """Find an advantage without the student's log-probability."""
    if context.settings.routes and context.setting(FORCED) and context.setting(BOUND) is None:
        yield context.error(
            81,
            f"{FORCED} is on and {BOUND} is not set: the student's log-probability would be left out of the advantage; "
            f"set {BOUND}, or {FORCED} to false",
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
        if not context.settings.routes and sizes[0] != sizes[1]:
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


def check_groups(context: StageContext) -> Iterator[Finding]:
    """Find GPUs of a teacher that the parallel groups do not fill, and teachers who are not Megatron's."""
    stage, nodes = context.settings, context.training_nodes
    if stage.algorithm != "distillation" or nodes <= 0:
        return
    sizes = [context.parallel_size(group, "teacher") for group in GROUPS]
    if stage.routes:
        sizes = [context.setting(f"{TEACHER}.{group}_parallel_size", 1) for group in GROUPS]
        nodes = stage.cluster.teacher_nodes
        if context.setting("policy.dtensor_cfg.enabled"):
            yield context.error(23, "policy.dtensor_cfg.enabled is on, but NeMo-RL's teachers (MOPD) are Megatron's")
    gpus, group = nodes * context.site.slurm.gpus_per_node, prod(sizes)
    if gpus % group:
        yield context.error(18, f"a teacher has {gpus} GPUs, no multiple of TP x CP x PP = {group}")
