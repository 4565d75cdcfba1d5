"""Make a project: a folder with config, recipe, site, profiles and a Snakefile of the installed Stagecoach."""

import argparse
import os
import re
import shlex
import shutil
from pathlib import Path
from string import Template

from scripts.commands.arguments import calling_folder
from scripts.errors import UserError
from scripts.installed import DISTRIBUTION, version_of
from scripts.recipe.load import load_recipe
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import installation

TEMPLATES = Path(__file__).with_name("template")
PLACES = {"gitignore": ".gitignore", "config.yaml": "config/config.yaml"}
NAMED = re.compile(r"config/(?:environments|templates)/[\w.-]+")


def run(arguments: argparse.Namespace) -> None:
    """Make the project and print the next commands."""
    root, target = installation(), arguments.directory
    if target.exists() and (not target.is_dir() or {path.name for path in target.iterdir()} - {".git"}):
        raise UserError(f"{target}: is there already and not empty; name a new folder")
    if (version := version_of(DISTRIBUTION)) is None:
        raise UserError("Stagecoach is not installed in this Python, so nothing can be pinned; see README")
    installed, recipe_file = version.partition("+")[0], _shipped("recipe", arguments.recipe)
    recipe = load_recipe(recipe_file)
    backends = {stage.backend for stage in recipe.stages.values()}
    site = _shipped("site", arguments.site or ("h100" if "nemo_rl" in backends else "laptop"))
    values = {
        "name": target.absolute().name,
        "version": installed,
        "recipe": recipe_file.name,
        "site": site.name,
        "requirement": f"{DISTRIBUTION}{'[trl]' if 'trl' in backends else ''}=={installed}",
        "options": " --profile slurm" if "\nslurm:" in site.read_text(encoding="utf-8") else "",
    }
    shutil.copytree(root / "profiles", target / "profiles", dirs_exist_ok=True)
    (target / "slurm").symlink_to("profiles/slurm")
    for template in TEMPLATES.iterdir():
        path = target / PLACES.get(template.name, template.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    named = [root / name for name in NAMED.findall(recipe_file.read_text(encoding="utf-8"))]
    for path in (recipe_file, site, *filter(Path.is_file, named), *(root / "config/schema").iterdir()):
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    shown = os.path.relpath(target, calling_folder())
    print(f"{shown} trains recipe {recipe.name} on site {site.stem}. Look at config/sites/{site.name}, then:")
    print(f"  cd {shlex.quote(shown)}\n  snakemake --dry-run\n  snakemake{values['options']}")


def _shipped(kind: str, name: str) -> Path:
    folder = installation() / f"config/{kind}s"
    path, names = folder / f"{Path(name).stem}.yaml", sorted(file.stem for file in folder.glob("*.yaml"))
    if not path.is_file():
        known = ", ".join(names)
        raise UserError(f"no {kind} is named {name}{nearest(name, names)}; there are: {known}")
    return path
