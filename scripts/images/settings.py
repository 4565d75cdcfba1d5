"""Typed model of config/images.yaml: the container images that stages run in, and how each is obtained."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from scripts.backends.nemo_rl.releases import load_releases
from scripts.errors import UserError
from scripts.recipe.site import Variable
from scripts.recipe.strict import Name, Strict, nearest
from scripts.recipe.yaml_file import line_of, read_yaml, validate

HOST = r"[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::[0-9]+)?"
REPOSITORY = r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
DIGEST = r"@sha256:[0-9a-f]{64}"

Reference = Annotated[
    str, StringConstraints(pattern=rf"^{HOST}/{REPOSITORY}:{TAG}(?:{DIGEST})?$"), Field(description="host/name:tag")
]
LocalTag = Annotated[str, StringConstraints(pattern=rf"^{REPOSITORY}:{TAG}$")]
Registry = Annotated[str, StringConstraints(pattern=rf"^{HOST}(?:/{REPOSITORY})?$")]
Argument = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$")]
RelativePath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)*$")]


class Pulled(Strict):
    """An image that a registry has."""

    kind: Literal["pull"]
    reference: Reference


class Built(Strict):
    """An image built from a Dockerfile of ours."""

    kind: Literal["build"]
    dockerfile: RelativePath
    base: Reference = Field(description="What BASE_IMAGE becomes; with @sha256:... it is pinned by content.")
    arguments: dict[Variable, Argument] = Field({}, description="Further build arguments. No secrets.")
    tag: LocalTag = Field(description="Name and tag of the result, without a registry.")


class BuiltFromGit(Strict):
    """An image built from somebody else's Dockerfile, at one commit of their repository."""

    kind: Literal["git"]
    repository: Annotated[str, StringConstraints(pattern=r"^https://[A-Za-z0-9./_-]+$")]
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    dockerfile: RelativePath
    target: Name | None = Field(None, description="The Dockerfile's stage that is built; none: its last.")
    arguments: dict[Variable, Argument] = Field({}, description="Build arguments. No secrets.")
    tag: LocalTag = Field(description="Name and tag of the result, without a registry.")


class Image(Strict):
    """One image; its name is that of its .sqsh file."""

    purpose: str
    releases: list[str] = Field([], description="NeMo-RL releases and branches that use it.")
    source: Annotated[Pulled | Built | BuiltFromGit, Field(discriminator="kind")]
    cost: str = Field("", description="How long it takes and how large it is, where that is known.")


class Images(Strict):
    """Every image by name."""

    registry: Registry | None = Field(
        None,
        description="Where built images are pushed to and imported from; none: they stay with this machine's Docker.",
    )
    images: dict[Name, Image] = Field(min_length=1)

    def built(self) -> list[str]:
        """Names of the images that are built, not pulled."""
        return [name for name, image in self.images.items() if not isinstance(image.source, Pulled)]

    def pulled(self) -> list[str]:
        """Names of the images that a registry has."""
        return [name for name, image in self.images.items() if isinstance(image.source, Pulled)]

    def full_tag(self, name: str) -> str:
        """Name and tag of a built image, with the registry it is pushed to."""
        tag = self.images[name].source.tag
        return f"{self.registry}/{tag}" if self.registry else tag


def load_images(path: Path) -> Images:
    """The images in a YAML file; a mistake is one line with file, line, key and what is wrong."""
    data, node = read_yaml(path)
    images = validate(Images, data, path, node)
    for name, image in images.images.items():
        for place, release in enumerate(image.releases):
            if release not in load_releases():
                line = line_of(node, ["images", name, "releases", str(place)], data)
                raise UserError(
                    f"{path}:{line}: images.{name}.releases: envs/nemo-rl.yaml has no release "
                    f"{release}{nearest(release, load_releases())}"
                )
    return images
