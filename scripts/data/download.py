"""Fetch a recipe's blends and the external tables of their placeholders, from the hub or from a folder."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from scripts.data.placeholders import TABLES
from scripts.errors import UserError, run_program
from scripts.files import describe_files, link_or_copy, replace_directory, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.models import FolderSource, Recipe


def fetch_source(recipe: Recipe, directory: Path) -> None:
    """Make `directory` hold every blend as ``<blend>.jsonl``, ``tables/`` and ``record.json`` with the commit.

    A branch's name is resolved once, to the commit that all files are taken from. A folder need not have the tables.
    """
    files = {name: blend.file or f"{name}.jsonl" for name, blend in recipe.blends.items()}
    tables = sorted({(table.repository, table.file) for table in TABLES.values()})
    with replace_directory(directory) as fresh:
        if isinstance(recipe.source, FolderSource):
            folder = Path(recipe.source.path)
            origin, revision = str(folder), "folder"
            for name, file in files.items():
                _copy(folder / file, fresh / f"{name}.jsonl")
            for repository, file in tables:
                if (folder / "tables" / repository / file).exists():
                    _copy(folder / "tables" / repository / file, fresh / "tables" / repository / file)
        else:
            origin = recipe.source.repository
            revision = _commit(origin, recipe.source.revision)
            for name, file in files.items():
                _fetch(origin, file, revision, fresh / f"{name}.jsonl")
            for repository, file in tables:
                _fetch(repository, file, _commit(repository, "main"), fresh / "tables" / repository / file)
        described = describe_files(fresh)
        write_json(fresh / "record.json", {"source": origin, "revision": revision, "files": described})


def _commit(repository: str, revision: str) -> str:
    try:
        return HfApi().dataset_info(repository, revision=revision).sha
    except (HfHubHTTPError, OSError) as error:
        raise _refused(repository, revision, error) from None


def _fetch(repository: str, file: str, revision: str, target: Path) -> None:
    try:
        _copy(Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision)), target)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise _refused(f"{repository}/{file}", revision, error) from None


def _refused(what: str, revision: str, error: Exception) -> UserError:
    hint = "is it gated, and HF_TOKEN set?" if isinstance(error, RepositoryNotFoundError) else "is the hub reachable?"
    return UserError(f"{what} at {revision}: the hub did not give it ({str(error).splitlines()[0]}); {hint}")


def _copy(source: Path, target: Path) -> None:
    """Link or copy a file of the source; UserError when it is not there."""
    if not source.is_file():
        raise UserError(f"{source}: no such file, but the recipe's source should have it")
    target.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(source, target)


def main() -> None:
    """Command line of the download."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.download", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="recipe YAML whose blends to fetch")
    parser.add_argument("--output", type=Path, required=True, help="directory for the blends, tables/ and record.json")
    arguments = parser.parse_args()
    fetch_source(load_recipe(arguments.recipe), arguments.output)


if __name__ == "__main__":
    run_program(main)
