"""The NeMo-RL releases of envs/nemo-rl.yaml: versions, config keys, abilities."""

from functools import cache
from typing import Literal

from pydantic import Field, PositiveInt

from scripts.errors import UserError
from scripts.recipe.strict import Strict, nearest
from scripts.recipe.yaml_file import installation, read_yaml

ABILITIES = {
    "judges_within_num_nodes": "cluster.num_nodes counts the judges' nodes",
    "skip_prefetched_venvs": "Gym's environments in the image are used",
    "transformers_5": "tokenizer settings of transformers 5 can be read",
    "offloads_optimizer": "the optimizer's copies on the CPU are those of the loaded weights",
    "merges_adapters": "the images' Python with Megatron has peft",
    "low_ports": "NeMo-RL's own ports lie below 9000",
    "writes_tokenizer_once": "one rank alone writes the tokenizer",
    "awaits_all_stages": "a pipeline's ranks all record the experts' losses",
    "begins_data_anew": "a checkpoint of another data set does not move the data loader",
    "external_judges": "judges answer outside the Ray cluster, and tools/external_gym_vllm starts pools of them",
    "names_automodel": "``policy.dtensor_cfg`` is ``policy.automodel_cfg``, without ``_v2``, which is always on",
}
OPD = "opd.py"
"""Module that asks the teacher of each row's agent, by which run_grpo_nemo_gym.py distils (MOPD)."""


class Converter(Strict):
    """The program that converts a Megatron checkpoint to Hugging Face's format, in `ranks` processes.

    `adapters`: the program that converts Megatron's adapters to peft's format, if any.
    """

    script: str
    ranks: PositiveInt = 1
    adapters: str | None = None


class Keys(Strict):
    """Keys of NeMo-RL's config by release; without `judge_nodes` judges take the nodes that the policy leaves."""

    train_data: str
    validation_data: str
    validation_generations: str
    judge_nodes: str | None = None


class Release(Strict):
    """One release of NeMo-RL, or a commit of a branch; `revision` is a tag where no commit could be had.

    `mounts`: folders of the checkout, and their paths in containers. `environment`: variables of every driver, with
    ``{cache}`` for the site's cache and ``{stage}`` for the stage; `launchers`: further variables by upstream launcher.
    `sft_data`: overrides by which SFT reads the splits ``{train}`` and ``{validation}``. `lacks`: programs of other
    releases. `can`: of ABILITIES.
    """

    name: str = Field("", description="The key in envs/nemo-rl.yaml.")
    about: str
    is_tried: bool = Field(True, description="False: read in NeMo-RL's documentation alone.")
    revision: str
    images: dict[str, str]
    versions: dict[str, str]
    python: Literal["python", "uv run python"]
    keys: Keys
    sft_data: dict[str, dict[str, str | bool | None]]
    can: list[Literal[*ABILITIES]]
    lacks: list[str] = Field([])
    converter: Converter
    apptainer: str | None = None
    sandbox_command: str = "/start-with-nginx.sh"
    mounts: dict[str, str]
    environment: dict[str, str]
    launchers: dict[str, dict[str, str]] = Field({})


class Releases(Strict):
    """envs/nemo-rl.yaml."""

    releases: dict[str, Release]


@cache
def load_releases() -> dict[str, Release]:
    """Return all releases by name."""
    releases = read_yaml(installation() / "envs/nemo-rl.yaml").validate(Releases).releases
    return {name: release.model_copy(update={"name": name}) for name, release in releases.items()}


def release_of(name: str) -> Release:
    """Return a release; UserError with the nearest name for an unknown one."""
    releases = load_releases()
    if name not in releases:
        raise UserError(f"envs/nemo-rl.yaml: no release is named {name}{nearest(name, releases)}")
    return releases[name]
