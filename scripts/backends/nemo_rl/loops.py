"""NeMo-RL's training loops: each answers for its settings, its rows, its teachers and what its driver is told.

An algorithm has one loop; distillation has two, by the driver that is named.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.backends.nemo_rl.releases import OPD, Release
from scripts.recipe.sampling import OWN
from scripts.recipe.strict import invalid, nearest

if TYPE_CHECKING:
    from scripts.backends.nemo_rl.checks.context import StageContext
    from scripts.backends.nemo_rl.command import Launch
    from scripts.backends.nemo_rl.settings import NemoRlSettings

SECTION_OF_TEACHERS = "++on_policy_distillation"
SETTINGS_OF_TEACHERS = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg"
PARALLEL_GROUPS = ("tensor_model", "context", "pipeline_model")
ROWS = "rows"
"""The folder, in a run's, of rows that are written for the driver."""


@dataclass(frozen=True)
class Loop:
    """A training loop of NeMo-RL; by default it learns rows as they are, without teachers."""

    section: str
    """The section of NeMo-RL's config with the loop's settings."""
    rewards: tuple[str | None, ...]
    """Where the reward may come from (`reward`); None: from nowhere."""
    drivers: tuple[str, ...] = ()
    """The programs that run it; empty: any."""
    passes_over: tuple[str, ...] = ("sft",)
    """Sections of a stage that the loop never reads, so that its config lacks them."""
    reads_conversations: bool = False
    """Whether the driver gets rows of messages, which are written for its reader."""
    makes_head: bool = False
    """Whether it trains a new head, for scores instead of tokens."""
    compares_vocabularies: bool = False
    """Whether the loss compares a token's probabilities over the whole vocabulary of another model."""
    idle_losses: tuple[str, ...] = ()
    """Weights of `loss_fn` whose terms no data reach."""

    @property
    def penalty(self) -> str:
        """The key of the price of leaving the reference."""
        return f"{self.section}.reference_policy_kl_penalty"

    @property
    def needed(self) -> list[tuple[str, str]]:
        """Section and key of the numbers that a stage must state."""
        return [("policy", "train_global_batch_size"), ("policy", "max_total_sequence_length")]

    def rows_per_step(self, stage: "NemoRlSettings") -> int:
        """Return the training rows of one step."""
        return stage.policy["train_global_batch_size"]

    def samples_of_row(self, stage: "NemoRlSettings") -> int:
        """Return what is learnt of a row: the row itself, or the responses sampled for it."""
        return 1

    def longest_row(self, length: int) -> int:
        """Return the most tokens of a row by those of prompt and response together."""
        return length

    def measures_kl(self, penalty: float) -> bool:
        """Whether the logged KL is measured: by the price of leaving the reference, whether a reference is loaded."""
        return True

    def logged_samples(self, stage: "NemoRlSettings") -> int | None:
        """Return the samples of which a step logs how many it masks; None: unknown."""
        return None

    def program(self, entry: str) -> str:
        """Return the name of the program that a release must have."""
        return entry.rpartition("/")[2]

    def refuse_misfits(self, stage: "NemoRlSettings") -> None:
        """Raise PydanticCustomError where the stage's numbers do not fit together."""

    def refuse_teachers(self, stage: "NemoRlSettings") -> None:
        """Raise PydanticCustomError where a stage has teachers that do not fit: here, any."""
        if stage.teachers or stage.cluster.teacher_nodes:
            raise invalid(f"{stage.algorithm} has no teachers; leave teachers and cluster.teacher_nodes out")

    def folder_of_rows(self, split: Path, run: Path) -> Path:
        """Return the folder of the rows that the driver reads."""
        return split.parent

    def data_keys(self, release: Release) -> dict[str, Any]:
        """Return where a release's driver is told the splits, by key."""
        return {release.keys.train_data: "{train}", release.keys.validation_data: "{validation}"}

    def defaults(self, stage: "NemoRlSettings") -> dict[str, Any]:
        """Return overrides of what upstream's examples set, which a stage may override again."""
        return {}

    def teachers(self, launch: "Launch") -> dict[str, Any]:
        """Return the overrides that name models and nodes of the teachers."""
        return {}

    def routes(self, launch: "Launch") -> dict[str, str] | None:
        """Return the teacher's model by environment; None where rows have no teachers of their own."""
        return None


@dataclass(frozen=True)
class Conversations(Loop):
    """SFT."""

    passes_over: tuple[str, ...] = ()
    reads_conversations: bool = True

    def longest_row(self, length: int) -> int:
        """Return one token less: a row of full length is masked."""
        return length - 1

    def logged_samples(self, stage: "NemoRlSettings") -> int:
        """Return the rows of a step."""
        return stage.samples_per_step

    def folder_of_rows(self, split: Path, run: Path) -> Path:
        """Return a folder of the run, for rows in the form of NeMo-RL's reader."""
        return run / ROWS

    def data_keys(self, release: Release) -> dict[str, Any]:
        """Return the release's readers of conversations, with the splits."""
        return release.sft_data

    def defaults(self, stage: "NemoRlSettings") -> dict[str, Any]:
        """Return the start's template, and how conversations begin and end: examples have a prompt of their data."""
        return {"++policy.tokenizer.chat_template": OWN, "data": stage.reads}


@dataclass(frozen=True)
class RewardModel(Loop):
    """The training of a reward model."""

    makes_head: bool = True

    def defaults(self, stage: "NemoRlSettings") -> dict[str, Any]:
        """Return the start's template: examples have one of their data."""
        return {"++policy.tokenizer.chat_template": OWN}


@dataclass(frozen=True)
class Rollouts(Loop):
    """A loop that samples responses to a row."""

    @property
    def needed(self) -> list[tuple[str, str]]:
        """Section and key of the numbers that a stage must state."""
        return [*super().needed, (self.section, "num_prompts_per_step"), (self.section, "num_generations_per_prompt")]

    def rows_per_step(self, stage: "NemoRlSettings") -> int:
        """Return the prompts of one step."""
        return stage.section["num_prompts_per_step"]

    def samples_of_row(self, stage: "NemoRlSettings") -> int:
        """Return the responses to a prompt."""
        return stage.section["num_generations_per_prompt"]

    def logged_samples(self, stage: "NemoRlSettings") -> int:
        """Return the responses of a step."""
        return stage.samples_per_step

    def refuse_misfits(self, stage: "NemoRlSettings") -> None:
        """Refuse responses of a step that do not fill the batches of its updates."""
        product, batch = stage.samples_per_step, stage.policy["train_global_batch_size"]
        loss = stage.loss_fn | stage.add.get("loss_fn", {})
        if loss.get("force_on_policy_ratio") and batch != product:
            raise invalid(
                f"loss_fn.force_on_policy_ratio wants policy.train_global_batch_size ({batch}) to be "
                f"{self.section}.num_prompts_per_step x num_generations_per_prompt = {product}"
            )
        if product % batch:
            raise invalid(
                f"{self.section}.num_prompts_per_step x num_generations_per_prompt = {product} is no multiple of "
                f"policy.train_global_batch_size, {batch}"
            )


@dataclass(frozen=True)
class Reinforcement(Rollouts):
    """GRPO."""

    idle_losses: tuple[str, ...] = ("positive_example_nll_weight",)

    @property
    def penalty(self) -> str:
        """The key of the price of leaving the reference, a part of the loss."""
        return "loss_fn.reference_policy_kl_penalty"

    def measures_kl(self, penalty: float) -> bool:
        """Whether a reference is loaded; a KL of 0 is logged without."""
        return penalty > 0


@dataclass(frozen=True)
class Distillation(Rollouts):
    """Distillation by one teacher, which shares the student's nodes."""

    compares_vocabularies: bool = True

    def refuse_teachers(self, stage: "NemoRlSettings") -> None:
        """Refuse teachers that are missing, unknown or idle, and more than one."""
        self.refuse_misnamed_teachers(stage)
        if len(stage.teachers) > 1 or stage.distillation.get("of"):
            raise invalid(
                f"{stage.entry} has one teacher of all rows: name one in teachers, and leave distillation.of out, "
                "or let entry be examples/nemo_gym/run_grpo_nemo_gym.py"
            )
        if stage.cluster.teacher_nodes:
            raise invalid("cluster.teacher_nodes: the teacher shares the student's nodes; leave it out")

    def refuse_misnamed_teachers(self, stage: "NemoRlSettings") -> None:
        """Refuse teachers that are missing, unknown or idle."""
        if not stage.teachers:
            raise invalid("teachers is missing: name the stage or model of each teacher by a role")
        if unknown := sorted(stage.taught_by - stage.teachers.keys()):
            raise invalid(f"distillation: no teacher is named {unknown[0]}{nearest(unknown[0], stage.teachers)}")
        if idle := sorted(stage.teachers.keys() - stage.taught_by):
            raise invalid(f"teacher {idle[0]} teaches nothing: name it in distillation.of, or as distillation.default")

    def teachers(self, launch: "Launch") -> dict[str, Any]:
        """Return the override that names the teacher's model."""
        return {"teacher.model_name": launch.teachers[launch.runtime.settings.default_teacher]}

    def groups_of_teacher(self, context: "StageContext") -> tuple[int, list[int]]:
        """Return the nodes of a teacher, and the sizes of its parallel groups."""
        return context.training_nodes, [context.parallel_size(group, "teacher") for group in PARALLEL_GROUPS]


@dataclass(frozen=True)
class RoutedDistillation(Distillation, Reinforcement):
    """Distillation in GRPO's loop: each row is taught by the teacher of its environment, on nodes of its own (MOPD)."""

    compares_vocabularies: bool = False
    idle_losses: tuple[str, ...] = Reinforcement.idle_losses

    def program(self, entry: str) -> str:
        """Return the module that asks the teachers."""
        return OPD

    def refuse_misfits(self, stage: "NemoRlSettings") -> None:
        """Refuse a synchronous loop, which asks no teachers."""
        if not stage.is_asynchronous:
            raise invalid("grpo.async_grpo.enabled must be true: NeMo-RL asks teachers during asynchronous training")
        super().refuse_misfits(stage)

    def refuse_teachers(self, stage: "NemoRlSettings") -> None:
        """Refuse teachers that are missing, unknown or idle, or without nodes."""
        self.refuse_misnamed_teachers(stage)
        if not stage.cluster.teacher_nodes:
            raise invalid("cluster.teacher_nodes must be stated: the nodes of each teacher, of num_nodes")

    def teachers(self, launch: "Launch") -> dict[str, Any]:
        """Return the overrides that ask teachers, each on nodes of its own."""
        cluster, slurm = launch.runtime.settings.cluster, launch.runtime.site.slurm
        nodes = {"num_nodes": cluster.teacher_nodes, "gpus_per_node": slurm.gpus_per_node}
        asks = {"enabled": True, "strict_agent_name_match": True, "deduplicate_shared_teacher_checkpoints": True}
        return {
            "++grpo.adv_estimator.name": "opd",
            SECTION_OF_TEACHERS: asks,
            f"{SECTION_OF_TEACHERS}.non_colocated_teachers": {"enabled": True, "default_teacher_cfg": nodes},
        }

    def groups_of_teacher(self, context: "StageContext") -> tuple[int, list[int]]:
        """Return the nodes of a teacher, and the sizes of its parallel groups."""
        keys = [f"{SETTINGS_OF_TEACHERS}.{group}_parallel_size" for group in PARALLEL_GROUPS]
        return context.settings.cluster.teacher_nodes, [context.setting(key, 1) for key in keys]

    def routes(self, launch: "Launch") -> dict[str, str]:
        """Return the teacher's model by environment: of those that the recipe names, and of those of the rows."""
        stage = launch.runtime.settings
        names = dict.fromkeys([*stage.distillation.get("of", {}), *launch.environments])
        taught = {name: stage.teaching.role_of(name, stage.teachers) for name in names}
        return {name: launch.teachers[role] for name, role in taught.items() if role}


DISTILLING = ("run_grpo_nemo_gym.py", "run_distillation.py", "run_distillation_nemo_gym.py")
LOOPS = {
    "sft": Conversations("sft", (None,), ("run_sft.py", "run_vlm_sft.py")),
    "grpo": Reinforcement("grpo", ("verifier", "judge")),
    "dpo": Loop("dpo", ("pairs",)),
    "mpo": Loop("mpo", ("pairs",)),
    "distillation": Distillation("distillation", (None, "verifier", "judge"), DISTILLING),
    "reward": RewardModel("rm", ("pairs",), ("run_rm.py",)),
}
"""The loop of each algorithm."""
BY_GRPO = LOOPS | {"distillation": RoutedDistillation("grpo", (None, "verifier", "judge"), DISTILLING)}
"""The loop of each algorithm, by a driver of GRPO."""


def loop_of(algorithm: str, entry: str) -> Loop:
    """Return the loop that a driver (`entry`) runs for an algorithm."""
    return BY_GRPO[algorithm] if "grpo" in entry else LOOPS[algorithm]
