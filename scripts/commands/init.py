"""Make a project: a folder with config, recipe, site, profiles and a Snakefile of the installed Stagecoach."""

import argparse
import json
import os
import re
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template

from scripts.commands.arguments import calling_folder
from scripts.errors import UserError
from scripts.files import explain_write_errors, fsync_directory, sync_tree, temporary_directory
from scripts.installed import DISTRIBUTION
from scripts.recipe.load import load_recipe
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import installation

TEMPLATES = Path(__file__).with_name("template")
PLACES = {"gitignore": ".gitignore", "config.yaml": "config/config.yaml"}
ELSEWHERE = """\
# Installed from the place behind the @ when the project was made. Where nobody can read the place, make a wheel in a
# clone of the same commit and write the wheel's address there:  python -m pip wheel --no-deps --wheel-dir wheel ."""
UNFINISHED = ".stagecoach-init"
"""In a folder to which not all files of a project were moved yet."""
BEGUN = re.compile(r"\.project\..+\.tmp")
"""A folder in which an earlier call prepared the files, and was killed."""
NAMED = re.compile(r"config/(?:environments|templates)/[\w.-]+")


def run(arguments: argparse.Namespace) -> None:
    """Make the project and print the next commands."""
    target = Path(os.path.abspath(arguments.directory))  # noqa: PTH100 (no link is followed)
    _check_free(target)
    recipe_file = _shipped("recipe", arguments.recipe)
    recipe = load_recipe(recipe_file)
    backends = {stage.backend for stage in recipe.stages.values()}
    site = _shipped("site", arguments.site or ("h100" if "nemo_rl" in backends else "laptop"))
    values = {
        "name": target.absolute().name,
        "recipe": recipe_file.name,
        "site": site.name,
        "options": " --profile slurm" if "\nslurm:" in site.read_text(encoding="utf-8") else "",
    } | _pin(f"{DISTRIBUTION}{'[trl]' if 'trl' in backends else ''}")
    # A kill leaves no project, or one that the next call completes.
    place = target / "project" if target.exists() else target  # the folder above an existing one may be another's
    with explain_write_errors(target), temporary_directory(place) as fresh:
        _fill(fresh, recipe_file, site, values)
        sync_tree(fresh)
        if target.exists():
            _move_into(target, fresh)
        else:
            fresh.rename(target)
    shown = os.path.relpath(target, calling_folder())
    print(f"{shown} trains recipe {recipe.name} on site {site.stem}. Look at config/sites/{site.name}, then:")
    print(f"  cd {shlex.quote(shown)}\n  snakemake --dry-run\n  snakemake{values['options']}")


def _check_free(target: Path) -> None:
    """UserError for a folder with files of others; a project that an earlier call began is completed."""
    if not target.exists():
        return
    names = {path.name for path in target.iterdir()} if target.is_dir() else {"a file"}
    of_others = {name for name in names - {".git"} if not BEGUN.fullmatch(name)}
    if of_others and UNFINISHED not in names:
        raise UserError(f"{target}: is there already and not empty; name a new folder")


def _fill(folder: Path, recipe_file: Path, site: Path, values: dict[str, str]) -> None:
    """Write a project's files into an empty folder: profiles, files made of templates, recipe, site and schemas."""
    root = installation()
    shutil.copytree(root / "profiles", folder / "profiles")
    (folder / "slurm").symlink_to("profiles/slurm")
    for template in TEMPLATES.iterdir():
        path = folder / PLACES.get(template.name, template.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    named = [root / name for name in NAMED.findall(recipe_file.read_text(encoding="utf-8"))]
    for path in (recipe_file, site, *filter(Path.is_file, named), *(root / "config/schema").iterdir()):
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _move_into(target: Path, fresh: Path) -> None:
    """Move a project's files into an empty folder, which a mark calls unfinished meanwhile."""
    mark = target / UNFINISHED
    mark.touch()
    for path in [*fresh.iterdir()]:
        place = target / path.name
        if place.is_dir() and not place.is_symlink():  # of a call that was killed
            shutil.rmtree(place)
        path.replace(place)
    fresh.rmdir()
    fsync_directory(target)
    mark.unlink()


def _pin(requirement: str) -> dict[str, str]:
    """Return the installed version and pip's line for the same package, by version or, without an index, by place.

    The place is in direct_url.json (PEP 610), which pip and uv write for all but packages of an index.
    """
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise UserError("Stagecoach is not installed in this Python, so nothing can be pinned; see README") from None
    pin = {"version": installed.version, "requirement": f"{requirement}=={installed.version}"}
    if origin := json.loads(installed.read_text("direct_url.json") or "{}"):
        commit = origin.get("vcs_info", {}).get("commit_id")
        place = f"git+{origin['url']}@{commit}" if commit else origin["url"]
        pin["requirement"] = f"{ELSEWHERE}\n{requirement} @ {place}"
    return pin


def _shipped(kind: str, name: str) -> Path:
    folder = installation() / f"config/{kind}s"
    path, names = folder / f"{Path(name).stem}.yaml", sorted(file.stem for file in folder.glob("*.yaml"))
    if not path.is_file():
        known = ", ".join(names)
        raise UserError(f"no {kind} is named {name}{nearest(name, names)}; there are: {known}")
    return path
