"""Build one image of config/images.yaml with Docker and record it by digest.

With a registry (`registry` in that file) the image is pushed there; without one it stays with this machine's Docker.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import sha256_file, write_json
from scripts.images.programs import output_of, require, require_buildx, run
from scripts.images.settings import Built, BuiltFromGit, Images, Pulled, load_images
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import project_or_shipped


def build_image(images: Images, name: str, root: Path) -> dict[str, Any]:
    """Build an image, push or load it, ask for its digest; returns its record."""
    source = images.images[name].source
    require_buildx()
    with _context(source, root) as (dockerfile, context), tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, "metadata.json")
        base = {"BASE_IMAGE": source.base} if isinstance(source, Built) else {}
        tag, arguments = images.full_tag(name), base | source.arguments
        target = {"target": source.target} if isinstance(source, BuiltFromGit) and source.target else {}
        run(
            *("docker", "buildx", "build", "--file", str(dockerfile), "--tag", tag, "--provenance=false"),
            *(part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")),
            *(f"--{key}={value}" for key, value in target.items()),
            *("--metadata-file", str(metadata), "--push" if images.registry else "--load", str(context)),
            advice=f"A build needs network; a push to {images.registry} needs docker login."
            if images.registry
            else "A build needs network.",
        )
        built = json.loads(metadata.read_text())
        return {
            "image": name,
            "tag": tag,
            "stored": "registry" if images.registry else "daemon",
            "digest": _digest(tag, built, pushed=images.registry is not None),
            **({"base": source.base} if isinstance(source, Built) else {}),
            **({"repository": source.repository, "commit": source.commit} if isinstance(source, BuiltFromGit) else {}),
            **target,
            "arguments": arguments,
            "dockerfile": source.dockerfile,
            "dockerfile_sha256": sha256_file(dockerfile),
        }


@contextmanager
def _context(source: Built | BuiltFromGit, root: Path) -> Iterator[tuple[Path, Path]]:
    """The Dockerfile and the folder that Docker sees: an empty one, or the other repository's tree."""
    with tempfile.TemporaryDirectory(prefix="stagecoach-build-") as folder:
        if isinstance(source, BuiltFromGit):
            clone(source.repository, source.commit, Path(folder))
            dockerfile = Path(folder, source.dockerfile)
        else:
            dockerfile = project_or_shipped(root / source.dockerfile)
        if not dockerfile.is_file():
            raise UserError(f"{source.dockerfile}: no such Dockerfile; correct it in config/images.yaml")
        yield dockerfile, Path(folder)


def clone(repository: str, commit: str, folder: Path) -> None:
    """Check out one commit of a repository, without its history, into an empty folder."""
    require("git")
    advice = f"Is {repository} reachable, and has it the commit {commit}?"
    run("git", "init", "--quiet", str(folder), advice=advice)
    run("git", "-C", str(folder), "fetch", "--quiet", "--depth", "1", repository, commit, advice=advice)
    run("git", "-C", str(folder), "checkout", "--quiet", "--detach", commit, advice=advice)


def _digest(tag: str, built: dict[str, Any], pushed: bool) -> str:
    """The image's digest as the build says; UserError when what holds the image says otherwise."""
    digests = {built.get("containerimage.digest"), built.get("containerimage.config.digest")} - {None}
    if pushed:
        manifest = output_of("docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", tag)
        found = json.loads(manifest).get("digest") if manifest else None
    else:
        found = output_of("docker", "image", "inspect", "--format", "{{.Id}}", tag)
    if not found or found not in digests:
        raise UserError(
            f"{tag}: was built as {' or '.join(sorted(digests)) or 'nothing'}, but {found or 'nothing'} is there under"
            " this name; did somebody else write it? Build again"
        )
    return found


def main() -> None:
    """Command line of the builder."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images.build", description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=Path, default=Path("config/images.yaml"), help="(default: %(default)s)")
    parser.add_argument("--name", required=True, help="which image")
    parser.add_argument("--output", type=Path, required=True, help="record of the image, such as images/<name>.json")
    arguments = parser.parse_args()
    images = load_images(arguments.images)
    if arguments.name not in images.images:
        raise UserError(f"{arguments.images}: has no image {arguments.name}{nearest(arguments.name, images.built())}")
    if isinstance(images.images[arguments.name].source, Pulled):
        raise UserError(f"{arguments.images}: {arguments.name} is pulled, not built: python -m scripts.images.squash")
    write_json(arguments.output, build_image(images, arguments.name, Path()))


if __name__ == "__main__":
    run_program(main)
