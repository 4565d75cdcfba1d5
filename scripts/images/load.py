"""Read config/images.yaml."""

from pathlib import Path

from scripts.backends.nemo_rl.releases import load_releases
from scripts.errors import UserError
from scripts.recipe.images import Images
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import line_of, read_yaml, validate


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
