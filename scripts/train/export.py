"""Export a published checkpoint in Hugging Face's format, for the next stage to start from."""

from pathlib import Path

from scripts.backends.protocol import backend_of
from scripts.errors import run_program
from scripts.recipe.load import load_site
from scripts.train.arguments import stage_of, stage_parser


def main() -> None:
    """Command line of the exporter."""
    parser = stage_parser("export", __doc__)
    parser.add_argument("--site", type=Path, help="the site, where a converter runs on its nodes")
    parser.add_argument("--log", type=Path, help="what the converter prints")
    arguments = parser.parse_args()
    stage = stage_of(arguments)
    site = load_site(arguments.site, stage.recipe) if arguments.site else None
    log = arguments.log.absolute() if arguments.log else None
    backend_of(stage.settings.backend).export(stage, site, log)


if __name__ == "__main__":
    run_program(main)
