"""Make a project: a folder with config, recipe, site, profiles and a Snakefile that uses this Stagecoach."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from scripts.commands.arguments import calling_folder
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.model import RandomModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import installation
from scripts.slurm.client import ask
from scripts.slurm.site_check import FORMAT, NodeGroup, node_groups

TEMPLATES = Path(__file__).with_name("template")
NAMED = re.compile(r"config/(?:environments|templates)/[\w.-]+")
GB = 1e9


def run(arguments: argparse.Namespace) -> None:
    """Make the project and say what comes next."""
    target = arguments.directory
    if target.exists() and (not target.is_dir() or {path.name for path in target.iterdir()} - {".git"}):
        raise UserError(f"{target}: is there already and not empty; name a new folder")
    version = _installed_version()
    recipe_file = _shipped_recipe(arguments.recipe)
    recipe = load_recipe(recipe_file)
    site, text, found = _site(recipe)
    name = target.absolute().name
    values = {"name": name, "version": version, "recipe": recipe_file.name, "site": f"{site}.yaml"}
    values |= {"requirement": _requirement(recipe, version), "results": _results(arguments.results, target)}
    values |= {"options": " --profile slurm" if "\nslurm:" in text else ""}
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as folder:
        project = Path(folder)
        for template, path in _templates():
            _write(project / path, Template(template.read_text(encoding="utf-8")).substitute(values))
        _write(project / f"config/sites/{site}.yaml", text)
        _copy_shipped(project, recipe_file)
        target.mkdir(exist_ok=True)
        for path in project.iterdir():
            path.rename(target / path.name)
    target = os.path.relpath(target, calling_folder())
    print(f"{target} trains recipe {recipe.name} on site {site}{found}. Look at config/sites/{site}.yaml, then:")
    print(f"  cd {shlex.quote(target)}\n  snakemake --dry-run\n  snakemake{values['options']}")


def _installed_version() -> str:
    try:
        import stagecoach  # noqa: PLC0415  (its version is that of an installed package)
    except (ImportError, PackageNotFoundError):
        raise UserError("Stagecoach is not installed in this Python, so nothing can be pinned; see README") from None
    return stagecoach.__version__.partition("+")[0]


def _shipped_recipe(name: str) -> Path:
    folder = installation() / "config/recipes"
    path = folder / f"{Path(name).stem}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        known = ", ".join(names)
        raise UserError(f"no recipe is named {name}{nearest(name, names) or f'; there are {known}'}")
    return path


def _templates() -> Iterator[tuple[Path, str]]:
    """Each template and where it goes in a project."""
    places = {"gitignore": ".gitignore", "config.yaml": "config/config.yaml"}
    for template in sorted(TEMPLATES.iterdir()):
        yield template, places.get(template.name, template.name)


def _copy_shipped(project: Path, recipe: Path) -> None:
    """The recipe with the files that it names, the schemas for editors, and Snakemake's profiles."""
    root = installation()
    named = {path for path in NAMED.findall(recipe.read_text(encoding="utf-8")) if (root / path).is_file()}
    for path in (recipe.relative_to(root), *named, *(root / "config/schema").iterdir()):
        _write(project / Path(path).relative_to(root if Path(path).is_absolute() else "."), (root / path).read_text())
    shutil.copytree(root / "profiles", project / "profiles")
    (project / "slurm").symlink_to("profiles/slurm")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _requirement(recipe: Recipe, version: str) -> str:
    extra = "[trl]" if any(stage.backend == "trl" for stage in recipe.stages.values()) else ""
    return f"stagecoach-workflow{extra}=={version}"


def _results(given: Path | None, target: Path) -> str:
    """The line of the config about results: the folder that was asked for, or the disk that has far more room."""
    if given is not None:
        return f"results: {json.dumps(str(given.absolute()), ensure_ascii=False)}"
    here = shutil.disk_usage(next(folder for folder in target.absolute().parents if folder.exists())).free
    listed = subprocess.run(
        ["df", "--local", "--output=avail,target", "--block-size=1", "-x", "tmpfs", "-x", "devtmpfs"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    disks = [line.split(maxsplit=1) for line in listed.stdout.splitlines()[1:]]
    rooms = [(int(free), disk) for free, disk in disks if os.access(disk, os.W_OK | os.X_OK) and Path(disk).is_dir()]
    free, disk = max(rooms, default=(0, ""))
    if free < 2 * here:
        return f"# results: /another/disk/{target.name} # instead of results/; {here / GB:.0f} GB are free here"
    return f"# results: {Path(disk, target.name)} # {free / GB:.0f} GB are free there, {here / GB:.0f} GB here"


def _site(recipe: Recipe) -> tuple[str, str, str]:
    """Name and text of the shipped site that fits recipe and machine, filled in; and what was found."""
    groups = _slurm_nodes()
    by_nemo_rl = any(stage.backend == "nemo_rl" for stage in recipe.stages.values())
    if by_nemo_rl or groups:
        name = "b200" if recipe.release == "super-v3" else "h100" if by_nemo_rl else _trl_site(recipe, groups)
        return name, *_with_slurm(_shipped_site(name), groups)
    memory = [] if isinstance(recipe.model, RandomModel) else _gpu_memory()
    if memory:
        text = _with(_shipped_site("gpu"), "gpu_memory_gb", round(min(memory) / 1024))
        return "gpu", text, f" ({len(memory)} GPUs of {min(memory) / 1024:.0f} GB, says nvidia-smi)"
    return "laptop", _shipped_site("laptop"), ""


def _trl_site(recipe: Recipe, groups: list[NodeGroup]) -> str:
    trains_on_gpus = not isinstance(recipe.model, RandomModel) and any(group.gpus for group in groups)
    return "gpu-cluster" if trains_on_gpus else "cluster"


def _shipped_site(name: str) -> str:
    return (installation() / f"config/sites/{name}.yaml").read_text(encoding="utf-8")


def _with(text: str, key: str, value: object, indent: str = "") -> str:
    """The YAML text with a key's value set, where the key stands, commented out or not; its comment stays."""
    return re.sub(rf"(?m)^{indent}(?:# )?{key}: [^#\n]*?( #.*)?$", rf"{indent}{key}: {value}\1", text, count=1)


def _slurm_nodes() -> list[NodeGroup]:
    """What sinfo lists of partitions that are up; nothing where there is no Slurm."""
    try:
        return [group for group in node_groups(ask("sinfo", "--noheader", f"--format={FORMAT}")) if group.is_up]
    except UserError:
        return []


def _with_slurm(text: str, groups: list[NodeGroup]) -> tuple[str, str]:
    """A site's text with the partition of most GPUs, the default one among equals, and what was found."""
    if not groups:
        return text, ""
    chosen = max(groups, key=lambda group: (group.gpus > 0, group.is_default, group.gpus * group.nodes))
    text = _with(text, "partition", chosen.partition, "  ")
    text = _with(text, "gpus_per_node", chosen.gpus, "  ")
    if chosen.limit is not None:
        text = _with(text, "max_runtime", int(chosen.limit), "  ")
    if light := next((group for group in groups if not group.gpus and group is not chosen), None):
        text = _with(text, "partition", light.partition, "    ")
    limit = "no time limit" if chosen.limit is None else f"at most {chosen.limit:.0f} minutes"
    return text, f" (partition {chosen.partition}: {chosen.nodes} nodes of {chosen.gpus} GPUs, {limit}, says sinfo)"


def _gpu_memory() -> list[int]:
    """The memory of each GPU of this machine, in MiB."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    asked = subprocess.run(  # noqa: S603
        [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in asked.stdout.split() if line.isdecimal()]
