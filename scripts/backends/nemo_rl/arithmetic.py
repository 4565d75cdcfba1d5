"""Whether the nodes, batches, rows and steps of a NeMo-RL stage add up."""

from collections.abc import Iterator

from scripts.backends.nemo_rl.patient import Finding, Patient
from scripts.backends.nemo_rl.settings import PREFETCHED_STEPS
from scripts.recipe.resolve import rows_of_manifest


def check_parallelism(patient: Patient) -> Iterator[Finding]:
    """The nodes must be filled by the parallel groups, and the batch shared out evenly."""
    stage, gpus = patient.stage, patient.site.slurm.gpus_per_node
    megatron = stage.policy.get("megatron_cfg", {})
    sizes = {
        name: megatron.get(key, 1)
        for name, key in (
            ("TP", "tensor_model_parallel_size"),
            ("CP", "context_parallel_size"),
            ("PP", "pipeline_model_parallel_size"),
            ("EP", "expert_model_parallel_size"),
            ("ETP", "expert_tensor_parallel_size"),
        )
    }
    judges = stage.cluster.judge_nodes if "judges_within_num_nodes" in patient.release.can else 0
    nodes = stage.cluster.num_nodes - stage.cluster.generation_nodes - judges
    training = nodes * gpus
    if training <= 0:
        yield patient.finding(17, f"cluster leaves {nodes} nodes to train on; raise cluster.num_nodes")
        return
    for names in (("TP", "CP", "PP"), ("ETP", "EP", "PP")):
        group = 1
        for size in names:
            group *= sizes[size]
        if training % group:
            yield patient.finding(
                18, f"{nodes} training nodes have {training} GPUs, no multiple of {' x '.join(names)} = {group}"
            )
    replicas = training // (sizes["TP"] * sizes["CP"] * sizes["PP"])
    if replicas and stage.policy["train_global_batch_size"] % replicas:
        yield patient.finding(
            19,
            f"policy.train_global_batch_size {stage.policy['train_global_batch_size']} cannot be shared evenly by the "
            f"{replicas} data-parallel replicas of {training} GPUs",
        )
    tensor = stage.policy.get("generation", {}).get("vllm_cfg", {}).get("tensor_parallel_size", 1)
    generating = (stage.cluster.generation_nodes or nodes) * gpus
    if generating % tensor:
        yield patient.finding(
            18, f"{generating} generating GPUs are no multiple of vLLM's tensor_parallel_size {tensor}"
        )


def check_rows_and_steps(patient: Patient) -> Iterator[Finding]:
    """The rows must be enough for the planned step: most releases wait for ever when they end before it."""
    stage, rows = patient.stage, rows_of_manifest(patient.data / "manifest.json")
    if rows is None:
        return
    planned = stage.planned_step(rows)
    batches = rows // stage.rows_per_step
    epochs = patient.setting("max_num_epochs", 1)
    if planned < 1:
        yield patient.finding(
            4,
            f"{rows} training rows make {batches} batches of {stage.rows_per_step}, too few to train; lower the batch",
        )
    elif stage.is_asynchronous and planned > batches - PREFETCHED_STEPS:
        yield patient.finding(
            4,
            f"max_num_steps is {planned}, but {rows} rows make {batches} steps of {stage.rows_per_step}, and "
            f"asynchronous training may lose the last {PREFETCHED_STEPS}, which it generates ahead; set it to "
            f"{batches - PREFETCHED_STEPS} at most or leave it out",
        )
    elif not stage.is_asynchronous and isinstance(epochs, int) and planned > batches * epochs:
        yield patient.finding(
            4,
            f"max_num_steps is {planned}, but {rows} rows make {batches} steps of {stage.rows_per_step} in each of "
            f"{epochs} epochs; set it to {batches * epochs} at most, or raise {stage.algorithm}.max_num_epochs",
        )


CHECKS = (check_parallelism, check_rows_and_steps)
