"""The NeMo-RL releases of envs/nemo-rl.yaml: what each is made of, what it reads, what it can do."""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from scripts.errors import UserError
from scripts.recipe.strict import Strict, nearest
from scripts.recipe.yaml_file import installation, read_yaml, validate

Ability = Literal[
    "judges_within_num_nodes",
    "skip_prefetched_venvs",
    "gym_compares",
    "transformers_5",
    "offloads_optimizer",
    "merges_adapters",
]


class Converter(Strict):
    """The release's program that writes a Megatron checkpoint in Hugging Face's format, in how many processes.

    `adapters`: the one that writes Megatron's adapters in peft's format; None: the release has none.
    """

    script: str
    ranks: PositiveInt = 1
    adapters: str | None = None


class Keys(Strict):
    """Keys of NeMo-RL's config whose names changed from release to release.

    `judge_nodes` is None where the release has no such key: judges then take the nodes that the policy leaves.
    """

    train_data: str
    validation_data: str
    validation_generations: str
    judge_nodes: str | None = None


class Release(Strict):
    """One release. `mounts`: folders of the checkout, and where containers see them besides their own path.

    In `environment`, the variables of every driver, ``{cache}`` stands for the site's cache, ``{stage}`` for the stage;
    `launchers` holds, by name, what a launcher of upstream's sets for its model besides.
    `sft_data` are the overrides by which its SFT reads the splits, ``{train}`` and ``{validation}``.
    `can`: ``pretrained_checkpoint``: it starts from a Megatron checkpoint as it is; ``judges_within_num_nodes``:
    cluster.num_nodes counts the judges' nodes too; ``skip_prefetched_venvs``: it takes Gym's environments that the
    image holds; ``gym_compares``: Gym compares the responses that a generative reward model judges, so they are scored
    outside training too; ``transformers_5``: it reads the tokenizer's settings as transformers 5 writes them;
    ``offloads_optimizer``: its optimizer's copies on the CPU are those of the loaded weights; ``merges_adapters``: the
    Python of its images that has Megatron has peft too.
    """

    name: str = Field("", description="The key under which it stands.")
    about: str
    revision: str
    images: dict[str, str]
    versions: dict[str, str]
    python: Literal["python", "uv run python"]
    keys: Keys
    sft_data: dict[str, dict[str, str | bool | None]]
    can: list[Ability]
    converter: Converter
    apptainer: str | None = None
    sandbox_command: str = "/start-with-nginx.sh"
    mounts: dict[str, str]
    environment: dict[str, str]
    launchers: dict[str, dict[str, str]] = Field({})

    @property
    def preserves_rows(self) -> bool:
        """Whether its SFT reads each row as it is."""
        return any(values.get("use_preserving_dataset") for values in self.sft_data.values())


class Releases(Strict):
    """envs/nemo-rl.yaml."""

    releases: dict[str, Release]


@cache
def load_releases(root: Path | None = None) -> dict[str, Release]:
    """All releases by name."""
    path = (root or installation()) / "envs/nemo-rl.yaml"
    data, node = read_yaml(path)
    releases = validate(Releases, data, path, node).releases
    return {name: release.model_copy(update={"name": name}) for name, release in releases.items()}


def release_of(name: str) -> Release:
    """The release of that name; UserError with the nearest when there is none."""
    releases = load_releases()
    if name not in releases:
        raise UserError(f"envs/nemo-rl.yaml: no release is named {name}{nearest(name, releases)}")
    return releases[name]
