"""Settings of backend `nemo_rl`: the stages and their nodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from scripts.backends.nemo_rl.releases import OPD, load_releases, release_of
from scripts.backends.nemo_rl.training import ROUTING, Judge, JudgeModel, JudgeName, NemoRlConfig, NemoRlTraining
from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.recipe.expand import Start
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.stage_settings import StageSettings, Surroundings, Teaching
from scripts.recipe.strict import Name, Strict, invalid, nearest, refuse_misnamed


class NemoRlCluster(Strict):
    """How many nodes NeMo-RL gets, in NeMo-RL's words; without effect on weights."""

    num_nodes: PositiveInt = Field(description="cluster.num_nodes of its config.")
    judge_nodes: NonNegativeInt = 0
    """Nodes of Gym's judge models (of num_nodes or besides, by release)."""
    generation_nodes: NonNegativeInt = 0
    """Of num_nodes, those that only generate (asynchronous training); 0: all do both."""
    teacher_nodes: NonNegativeInt = 0
    """Of num_nodes, those of each distinct teacher, where each row is taught by its environment's (MOPD)."""


class NemoRlSettings(StageSettings, NemoRlTraining):
    """A stage that NeMo-RL trains."""

    gone: ClassVar = {
        "pretrained_checkpoint": "leave it out; the stage starts from its parent's export in Hugging Face's format"
    }

    config_model = NemoRlConfig
    ADDED: ClassVar = ("rm", "distillation", "on_policy_distillation", "teacher", "judges")
    """Sections of which earlier identities know nothing; left out where empty."""
    ROLES: ClassVar[tuple[str, ...]] = ("teachers",)
    default_seed = None
    is_converted = True
    is_rewarded_here = False
    site_sets_nodes = False

    image: str = Field("train", description="The container, by its name in the release or the site.")
    cluster: NemoRlCluster
    logger: dict[str, Any] = Field({})
    teachers: dict[Name, Start] = Field({})
    """The start of each teacher by its role, for distillation."""
    judges: dict[JudgeName, Judge] = Field({})
    """Judges outside the Ray cluster, by names of your own. No GPU tried them. (Gym's own take cluster.judge_nodes.)"""
    launcher: str | None = None
    """A launcher of upstream's by its name in the release: the driver gets its variables."""

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return name and commit of the release."""
        return {"name": release, "revision": release_of(release).revision}

    def values_with_effect(self) -> dict[str, Any]:
        """Return the settings with effect on weights, with the hash of a chat template in a file."""
        values = super().values_with_effect() | {"mtp": False}
        with_effect = {*JudgeModel.model_fields}
        values["judges"] = {name: judge.model_dump(include=with_effect) for name, judge in self.judges.items()}
        for name in (*(["sft"] if self.algorithm != "sft" else []), *(key for key in self.ADDED if not values[key])):
            del values[name]
        if self.chat_template and self.chat_template.endswith(".jinja") and Path(self.chat_template).is_file():
            values["template_sha256"] = sha256_file(Path(self.chat_template))
        return values

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are taken in a random order; unsaid, NeMo-RL's config decides."""
        return bool(self.data.get("shuffle", True))

    def first_model(self, model: RandomModel | PretrainedModel) -> dict[str, Any]:
        """Return the model's name and revision."""
        return model.model_dump(mode="json", include={"name", "revision"})

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where the recipe's release, model or blend does not fit the stage."""
        if around.release is None:
            raise invalid("names no NeMo-RL release", "release")
        refuse_misnamed("release", "release", around.release, load_releases())
        if self.parent is None and not isinstance(around.model, PretrainedModel):
            raise invalid("NeMo-RL starts from a pretrained model: give its name", "model")
        blend = around.blend
        if blend.format == "mmpr_tiny" and self.data.get("val_size") != blend.holdout:
            raise invalid(f"must be the holdout of blend {self.blend}, {blend.holdout}", f"{around.at}.data.val_size")

    def completed(self, release: str | None, name: str, key: Callable[..., str]) -> Self:
        """Return the stage with the nodes of its cluster; UserError for a launcher unknown to the release."""
        pinned = release_of(release)
        program = OPD if self.routes else self.entry.rpartition("/")[2]
        if program in pinned.lacks:
            able = [each.name for each in load_releases().values() if program not in each.lacks]
            raise UserError(
                f"{key('stages', name, 'entry')}: {release} has no {program}, which trains the stage; these "
                f"releases have it: {', '.join(able)}"
            )
        if self.launcher is not None and self.launcher not in pinned.launchers:
            at, known = key("stages", name, "launcher"), nearest(self.launcher, pinned.launchers)
            raise UserError(f"{at}: {release} has no launcher {self.launcher}{known}")
        if self.judges and "external_judges" not in pinned.can:
            able = [each.name for each in load_releases().values() if "external_judges" in each.can]
            raise UserError(
                f"{key('stages', name, 'judges')}: {release} has no judges outside the Ray cluster; name "
                f"release {' or '.join(able)}, or serve judges by NeMo-Gym (cluster.judge_nodes)"
            )
        besides = 0 if "judges_within_num_nodes" in pinned.can else self.cluster.judge_nodes
        nodes = {"nodes": self.cluster.num_nodes + besides}
        return self.model_copy(update={"resources": self.resources.model_copy(update=nodes)})

    @property
    def nodes_beside(self) -> int:
        """Return the nodes of all pools of judges; a server elsewhere has no replicas."""
        return sum((judge.replicas or 0) * judge.nodes_per_replica for judge in self.judges.values())

    @property
    def teaching(self) -> Teaching:
        """Return the routing of ``distillation``, whose other keys are NeMo-RL's."""
        return Teaching.model_construct(**{key: self.distillation[key] for key in self.distillation.keys() & ROUTING})

    @property
    def default_teacher(self) -> str | None:
        """Return the role for environments that ``distillation.of`` does not name: as stated, or a sole teacher's."""
        return self.teaching.default_among(self.teachers)

    @property
    def taught_by(self) -> set[str]:
        """Return the roles of the teachers that teach."""
        return {*self.distillation.get("of", {}).values(), self.default_teacher} - {None}

    @property
    def nodes_of_teachers(self) -> int:
        """Return the nodes of all distinct teachers; the same start in two roles is one teacher."""
        return self.cluster.teacher_nodes * len({self.teachers[role] for role in self.taught_by})

    @model_validator(mode="after")
    def _teachers_teach(self) -> "NemoRlSettings":
        if self.algorithm != "distillation":
            if self.teachers or self.cluster.teacher_nodes:
                raise invalid(f"{self.algorithm} has no teachers; leave teachers and cluster.teacher_nodes out")
            return self
        if not self.teachers:
            raise invalid("teachers is missing: name the stage or model of each teacher by a role")
        if unknown := sorted(self.taught_by - self.teachers.keys()):
            raise invalid(f"distillation: no teacher is named {unknown[0]}{nearest(unknown[0], self.teachers)}")
        if idle := sorted(self.teachers.keys() - self.taught_by):
            raise invalid(f"teacher {idle[0]} teaches nothing: name it in distillation.of, or as distillation.default")
        if not self.routes and (len(self.teachers) > 1 or self.distillation.get("of")):
            raise invalid(
                f"{self.entry} has one teacher of all rows: name one in teachers, and leave distillation.of out, "
                "or let entry be examples/nemo_gym/run_grpo_nemo_gym.py"
            )
        if self.routes != bool(self.cluster.teacher_nodes):
            raise invalid(
                "cluster.teacher_nodes must be stated: the nodes of each teacher, of num_nodes"
                if self.routes
                else "cluster.teacher_nodes: the teacher shares the student's nodes; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _judges_are_asked_and_nodes_add_up(self) -> "NemoRlSettings":
        if self.judges and "nemo_gym" not in self.entry:
            raise invalid(f"judges: {self.entry} asks no server of NeMo-Gym; leave judges out")
        servers = [judge.server for judge in self.judges.values()]
        if doubled := next((server for server in servers if servers.count(server) > 1), None):
            raise invalid(f"judges: several have the server {doubled}; name each server once")
        if self.cluster.generation_nodes + self.nodes_of_teachers >= self.cluster.num_nodes:
            kinds = "generation_nodes and teachers leave" if self.nodes_of_teachers else "generation_nodes leaves"
            raise invalid(f"cluster.{kinds} no node to train on")
        if self.resources.nodes != 1:
            raise invalid("resources.nodes follows from cluster here; leave it out")
        return self


STAGES = dict.fromkeys(("sft", "grpo", "dpo", "mpo", "distillation", "reward"), NemoRlSettings)
