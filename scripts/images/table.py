"""Write the table of images in docs/images.md from config/images.yaml."""

import argparse
from pathlib import Path

from scripts.errors import UserError, run_program
from scripts.files import write_text
from scripts.images.settings import Built, Image, Images, Pulled, load_images

BEGIN = "<!-- made by python -m scripts.images.table -->\n"
END = "<!-- end -->\n"


def table(images: Images) -> str:
    """A row for each image: what it is for, where it comes from, which releases use it, what it costs."""
    lines = ["| image | for | from | releases | cost |", "| --- | --- | --- | --- | --- |"]
    for name, image in images.images.items():
        cells = (f"`{name}`", image.purpose, _origin(image), ", ".join(image.releases), image.cost)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _origin(image: Image) -> str:
    source = image.source
    if isinstance(source, Pulled):
        return f"`{source.reference}`"
    if isinstance(source, Built):
        return f"`{source.dockerfile}` on `{source.base}`"
    return f"`{source.dockerfile}` of <{source.repository}> at `{source.commit}`"


def with_table(document: str, images: Images) -> str:
    """The document with its table made anew."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"docs/images.md: has not the lines {BEGIN.strip()} and {END.strip()}; put them back")
    return before + begin + table(images) + end + after


def main() -> None:
    """Command line of the table's maker."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images.table", description=__doc__)
    parser.add_argument("--images", type=Path, default=Path("config/images.yaml"), help="(default: %(default)s)")
    parser.add_argument("--document", type=Path, default=Path("docs/images.md"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    write_text(arguments.document, with_table(arguments.document.read_text(), load_images(arguments.images)))


if __name__ == "__main__":
    run_program(main)
