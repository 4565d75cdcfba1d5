"""Numbers of a NeMo-RL stage that must add up: cohorts, nodes, batches, rows, steps."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scripts.backends.nemo_rl.checks.context import StageContext, load_upstream, of_loop
from scripts.backends.nemo_rl.loops import Reinforcement
from scripts.backends.nemo_rl.settings import PREFETCHED_STEPS
from scripts.finding import Finding
from scripts.records import Manifest, read_record
from scripts.rewards.row_facts import FactsOf
from scripts.rows.examples import PAIR_OF_TEXTS, RANKED
from scripts.rows.jsonl import read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.measures import Split, recorded

SANDBOXED = re.compile(r"ns_tools|math_formal_lean|lean4")
GYM = "3rdparty/Gym-workspace/Gym"


@of_loop(Reinforcement)
def check_cohorts(context: StageContext) -> Iterator[Finding]:
    """Find cohorts for which a generative reward model waits for ever, and epochs that asynchronous loops ignore."""
    stage = context.settings
    generations = stage.grpo["num_generations_per_prompt"]
    cohorts = context.values("env", "num_rollouts_per_prompt")
    for where, size in cohorts.items():
        if isinstance(size, int) and size != generations:
            yield context.error(
                20,
                f"env.{where} is {size}, but grpo.num_generations_per_prompt is {generations}: the reward model would "
                "wait for ever; make them equal",
            )
    key = context.release.keys.validation_generations
    if context.validates and cohorts and context.setting(key) != generations:
        yield context.error(20, f"it validates with a reward model, so {key} must be {generations} too")
    if stage.is_asynchronous and (epochs := stage.grpo.get("max_num_epochs", 1)) != 1:
        yield context.warning(
            5, f"grpo.max_num_epochs is {epochs}, but asynchronous training makes one pass over the rows"
        )


def check_checkpoints(context: StageContext) -> Iterator[Finding]:
    """Find checkpoints that repeat weights, or that are ranked or judged by a metric nobody measures."""
    for where, value in context.values("policy", "async_save").items():
        if value is True and context.setting("policy.megatron_cfg.enabled"):
            yield context.warning(
                10, f"policy.{where} is on, which has saved old weights again and again; set it to false"
            )
    if context.settings.checkpointing.keep_top_k and not context.validates:
        yield context.warning(
            27,
            "checkpointing.keep_top_k asks for the best checkpoints, but nothing validates, so NeMo-RL would keep the "
            "newest; set keep_last_k instead, or a val_period",
        )
    judged = [bound.metric for bound in context.settings.gate if "validation_" in bound.metric]
    if judged and not context.validates:
        yield context.warning(
            27,
            f"its gate judges {judged[0]}, but nothing validates; set {context.settings.loop.section}.val_period, "
            "or val_at_end",
        )


def check_environments(context: StageContext) -> Iterator[Finding]:
    """Find environments without the sandbox, and environments without rows."""
    if not context.stage.manifest.exists():
        return
    splits = read_record(context.stage.manifest, Manifest)
    names = {name for split in ("train", "validation") for name in splits[split].get("environments", {})}
    sandboxed = sorted(filter(SANDBOXED.search, names))
    if sandboxed and not context.settings.sandbox:
        yield context.error(21, f"{', '.join(sandboxed)} need the sandbox; set sandbox: true")
    served = agents_of(context)
    if without := sorted(served - names):
        yield context.warning(
            21,
            f"{len(without)} of the {len(served)} environments that its config runs have no row, so "
            f"nothing is learnt there: {', '.join(without)}; published data are a part of what the model learnt from",
        )


def agents_of(context: StageContext) -> set[str]:
    """Return the agents of the stage's Gym, by which rows name environments, as far as files are there."""
    gym = Path(context.nemo_rl.checkouts.get(context.release.name, ""), GYM)
    settings = context.setting("env.nemo_gym") or {}
    files = [load_upstream(gym / path) for path in settings.get("config_paths") or [] if (gym / path).is_file()]
    servers = [server for section in (*files, settings) for server in section.items()]
    return {name for name, server in servers if isinstance(server, dict) and "responses_api_agents" in server}


def check_parallelism(context: StageContext) -> Iterator[Finding]:
    """Find GPUs left over by the parallel groups, and batches that replicas cannot share evenly."""
    stage, cluster, gpus = context.settings, context.settings.cluster, context.site.slurm.gpus_per_node
    batch, groups = stage.policy["train_global_batch_size"], ("tensor_model", "context", "pipeline_model")
    tp, cp, pp, ep, etp = map(context.parallel_size, (*groups, "expert_model", "expert_tensor"))
    nodes = context.training_nodes
    training, generating = nodes * gpus, (cluster.generation_nodes or nodes) * gpus
    if training <= 0:
        yield context.error(17, f"cluster leaves {nodes} nodes to train on; raise cluster.num_nodes")
        return
    for names, size in (("TP x CP x PP", tp * cp * pp), ("ETP x EP x PP", etp * ep * pp)):
        if training % size:
            yield context.error(18, f"{nodes} training nodes have {training} GPUs, no multiple of {names} = {size}")
    replicas = training // (tp * cp * pp)
    if replicas and batch % replicas:
        yield context.error(
            19,
            f"policy.train_global_batch_size {batch} cannot be shared evenly by the {replicas} data-parallel replicas "
            f"of {training} GPUs",
        )
    scored = context.of_algorithm("val_global_batch_size") if context.validates else None
    together = replicas * (context.of_algorithm("val_micro_batch_size") or 1)
    if isinstance(scored, int) and replicas and scored % together:
        yield context.error(
            19,
            f"{stage.loop.section}.val_global_batch_size {scored} cannot be shared evenly by {replicas} data-parallel "
            f"replicas in micro-batches; make it a multiple of {together}",
        )
    if generating % (tensor := stage.policy.get("generation", {}).get("vllm_cfg", {}).get("tensor_parallel_size", 1)):
        yield context.error(18, f"{generating} generating GPUs are no multiple of vLLM's tensor_parallel_size {tensor}")


def check_preferences(context: StageContext) -> Iterator[Finding]:
    """Find a reader of preferences for another form than the first row's."""
    split, name = context.stage.train_split, context.setting("data.train.dataset_name")
    readers = {"PreferenceDataset": RANKED, "BinaryPreferenceDataset": PAIR_OF_TEXTS}
    if context.settings.reward != "pairs" or name not in readers or not split.exists():
        return
    allow = frozenset(context.stage.recipe.blends[context.settings.blend].allow)
    facts = recorded(Split.of(split), FactsOf("preferences", allow))
    form = facts.form if facts is not None else next(KINDS["preferences"].form(row) for _, _, row in read_rows(split))
    if form != readers[name]:
        yield context.error(
            23,
            f"the rows of {split} are {form}, but data.train.dataset_name {name} reads {readers[name]}; name the other "
            "reader, or write the rows as context and completions (docs/data.md, Preferences) for PreferenceDataset",
        )


def check_rows_and_steps(context: StageContext) -> Iterator[Finding]:
    """Find rows that end before the planned step, where most releases wait for ever."""
    stage, rows = context.settings, context.stage.rows
    epochs = context.of_algorithm("max_num_epochs", 1)
    if isinstance(epochs, int) and epochs < 1:
        yield context.error(
            94,
            f"{stage.loop.section}.max_num_epochs is {epochs}: no step would be trained, with exit status 0; raise it",
        )
        return
    if rows is None:
        return
    planned, batches = stage.planned_step(rows), rows // stage.rows_per_step
    continued = [replace(context.stage, name=before.name) for before in context.stage.node.continued]
    begun = sum(before.planned or 0 for before in continued)
    too_many = f"max_num_steps is {planned}, but {rows} rows make {batches} steps of {stage.rows_per_step}"
    if planned < 1:
        yield context.error(
            4,
            f"{rows} training rows make {batches} batches of {stage.rows_per_step}, too few to train; lower the batch",
        )
    elif stage.is_asynchronous and planned - begun > batches - PREFETCHED_STEPS:
        yield context.error(
            4,
            f"{too_many}, and asynchronous training may lose the last {PREFETCHED_STEPS}, which it generates ahead; "
            f"set it to {batches - PREFETCHED_STEPS + begun} at most or leave it out",
        )
    elif not stage.is_asynchronous and isinstance(epochs, int) and planned - begun > batches * epochs:
        yield context.error(
            4,
            f"{too_many} in each of {epochs} epochs; set it to {batches * epochs + begun} at most, or raise "
            f"{stage.loop.section}.max_num_epochs",
        )
