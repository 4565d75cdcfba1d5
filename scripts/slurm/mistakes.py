"""Messages on mistakes: one line with the nearest target and no frame of Python."""

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake import exceptions
from snakemake.io import strip_wildcard_constraints

from scripts.errors import UserError, explain_refusal
from scripts.recipe.config import Config
from scripts.recipe.load import check_stage_name
from scripts.recipe.recipe import Recipe
from scripts.recipe.yaml_file import read_yaml
from scripts.slurm.controller_lock import holders

CONFIG = Path("config/config.yaml")
NO_RULE = re.compile(r"No rule to produce (.+?) \(if you use")


class Messages:
    """Messages of a call of Snakemake; those on targets need `config` and `recipe`."""

    def __init__(self, workflow: Any) -> None:
        self.workflow = workflow
        self.config: Config | None = None
        self.recipe: Recipe | None = None

    def line(self, error: BaseException) -> str | None:
        """Return the message on an exception; None leaves Snakemake's text."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                return str(cause)
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, OSError) and error.filename is not None:
            return explain_refusal(error)
        if isinstance(error, exceptions.LockException):
            holder = ", ".join(holders(Path(".snakemake"))) or "a Snakemake that left no note of itself"
            return f"{Path.cwd()} is locked by {holder}; wait for it or stop it; if it is dead: snakemake --unlock"
        if self.config is None and (fault := self._of_config()):
            return fault
        if "At least one job did not complete" in str(error):
            return "not all jobs are done; what each said stands above. Called again, Snakemake goes on from there"
        return self._of_target(error) if self.recipe else None

    def _of_config(self) -> str | None:
        """Return the fault of the config, for which Snakemake names no line; None for a file with keys."""
        if not CONFIG.is_file():
            return (
                f"{Path.cwd() / CONFIG}: no such file; call it in your clone, or in a project: stagecoach init FOLDER"
            )
        try:
            if isinstance(data := read_yaml(CONFIG).data, dict) and data:
                return None
        except UserError as error:
            return str(error)
        return f"{CONFIG}: holds no keys; it needs recipe and site at least, as in the one that came with the clone"

    def _of_target(self, error: BaseException) -> str | None:
        if missing := NO_RULE.search(str(error)):
            try:
                return self.missing_target(missing[1])
            except UserError as known:
                return str(known)
        if "Target rules may not contain wildcards" not in str(error):
            return None
        rules = {rule.name: rule for rule in self.workflow.rules}
        name = next(target for target in self.workflow.dag_settings.targets if target in rules)
        return f"{name} is a rule for many files; name one of them, such as {next(self._files(rules[name]), '')}"

    def missing_target(self, target: str) -> str:
        """Explain why no rule makes a target, and suggest the nearest target."""
        named = os.path.relpath(target), self.config.folder, self.config.results
        parts, own, root = (Path(path).parts for path in named)
        files = {file for rule in self.workflow.rules for file in self._files(rule)}
        for begin, ending in product(range(len(parts)), [(), ("ckpt",)]):
            if (meant := "/".join([*own, *parts[begin:], *ending])) in files:
                return f"{target}: results of this call go to {self.config.folder}/; did you mean {meant}?"
        rest = parts[len(own) :] if parts[: len(own)] == own else parts[len(root) * (parts[: len(root)] == root) :]
        near = {file for file in files if file.startswith(f"{self.config.folder}/{rest[0]}/")} if rest else set()
        if len(rest) > 1 and (not near or rest[0] in self.recipe.sweeps):
            check_stage_name(self.recipe, rest[0], f"{target}: ")
        close = get_close_matches(target, near or files | {rule.name for rule in self.workflow.rules}, n=1, cutoff=0.5)
        some = f"targets are files, such as {self.config.folder}/{[*self.recipe.stages][-1]}/ckpt"
        return f"{target}: no rule makes it; {f'did you mean {close[0]}?' if close else some}"

    def _files(self, rule: Any) -> Iterator[str]:
        values = {"stage": [*self.recipe.stages, *self.recipe.checkpoints], "blend": [*self.recipe.blends]}
        for output in rule.output:
            pattern, names = strip_wildcard_constraints(str(output)), sorted(output.get_wildcard_names())
            if set(names) <= values.keys():
                for chosen in product(*(values[name] for name in names)):
                    file = pattern.format(**dict(zip(names, chosen, strict=True)))
                    if output.match(file):
                        yield file
