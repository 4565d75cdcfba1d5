"""Every stage of every recipe of NeMo-RL through the loader and the typed config of the releases that it is meant for.

    STAGECOACH_NEMO_RL=... STAGECOACH_NEMO_RL_PYTHON=... python benchmarks/recipes.py >> benchmarks/recipes.md

CONTRIBUTING.md says what the variables name. A recipe is meant for the release that it names, one of v0.7.0 for main as
well. Status 1 when something is refused or comes out otherwise.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.backends.nemo_rl.checks.context import value_of  # noqa: E402
from scripts.backends.nemo_rl.checks.places import DEADLINE, any_launch, unknown_keys  # noqa: E402
from scripts.backends.nemo_rl.command import hydra_overrides  # noqa: E402
from scripts.backends.nemo_rl.releases import release_of  # noqa: E402
from scripts.recipe.recipe import Recipe  # noqa: E402
from tests.production import TRIED, stages_of, stated, whole_recipe  # noqa: E402

VARIABLES = ("STAGECOACH_NEMO_RL", "STAGECOACH_NEMO_RL_PYTHON")
LATER = {"main": "v0.7.0"}
RESOLVE = ROOT / "tests/nemo_rl/cpu/resolve.py"


@dataclass
class Found:
    """A recipe on a release: how many overrides its stages have, what was refused, which values came out otherwise."""

    recipe: str
    release: str
    stages: int
    unknown: list[str]
    overrides: int = 0
    values: int = 0
    refused: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    resolved: dict[str, dict[str, Any]] = field(default_factory=dict)


def recipes() -> list[Recipe]:
    """The recipes with a stage that NeMo-RL trains, with all of their stages."""
    loaded = [whole_recipe(path.stem) for path in sorted((ROOT / "config/recipes").glob("*.yaml"))]
    return [recipe for recipe in loaded if stages_of(recipe)]


def on_release(release: str) -> list[Recipe]:
    """The recipes that are meant for a release, naming it."""
    meant = [recipe for recipe in recipes() if recipe.release in (release, LATER.get(release))]
    return [recipe.model_copy(update={"release": release}) for recipe in meant]


def resolve(release: str, checkouts: Path, python: Path) -> list[Found]:
    """What becomes of each recipe on a release, in one process of its Python."""
    checkout, asked, found = (checkouts / release).resolve(), [], []
    for recipe in on_release(release):
        stages = stages_of(recipe)
        found.append(
            Found(
                recipe.name,
                release,
                len(stages),
                [line for name in stages for line in unknown_keys(recipe, checkout, name)],
            )
        )
        for name, stage in stages.items():
            launch = dataclasses.replace(any_launch(name, recipe, checkout), max_num_steps=stage.max_num_steps or 1)
            overrides = [*hydra_overrides(launch), DEADLINE]
            asked.append(
                (found[-1], name, stage, {"entry": stage.entry, "config": stage.config, "overrides": overrides})
            )
    answers = _ask(checkout, python, [question for *_, question in asked])
    for (one, name, stage, question), answer in zip(asked, answers, strict=True):
        one.overrides += len(question["overrides"])
        if "refused" in answer:
            one.refused.append(f"{name}: {answer['refused']}")
            continue
        one.resolved[name] = answer["values"]
        ours = {key: value for key, value in stated(stage, release_of(release)).items() if "{" not in str(value)}
        one.values += len(ours)
        theirs = {key: value_of(answer["values"], key) for key in ours}
        one.differ += [f"{name}: {key}: {ours[key]}; {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    return found


def _ask(checkout: Path, python: Path, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked.json"), Path(folder, "answered.json")
        asked.write_text(json.dumps(questions))
        environment = os.environ | {"PYTHONPATH": str(checkout), "PERSISTENT_CACHE": "/cache", "CACHE_ROOT": "/cache"}
        subprocess.run([python, "-W", "ignore", RESOLVE, asked, answered], cwd=checkout, env=environment, check=True)
        return json.loads(answered.read_text())


def main() -> int:
    """Print the table."""
    if "--smoke" in sys.argv[1:]:
        loaded = recipes()
        said = [hydra_overrides(any_launch(name, recipe, ROOT)) for recipe in loaded for name in stages_of(recipe)]
        print(f"recipes: {len(loaded)}, stages: {len(said)}, overrides: {sum(map(len, said))}; no release was asked")
        return 0
    if missing := [name for name in VARIABLES if name not in os.environ]:
        sys.exit(f"error: set {' and '.join(missing)} (CONTRIBUTING.md), or try --smoke")
    checkouts, python = (Path(os.environ[name]).absolute() for name in VARIABLES)
    found = [one for release in TRIED for one in resolve(release, checkouts, python)]
    print("| recipe | release | stages | overrides | unknown keys | stages refused | values compared | differ |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in sorted(found, key=lambda one: one.recipe):
        counts = (one.stages, one.overrides, len(one.unknown), len(one.refused), one.values, len(one.differ))
        print(f"| {one.recipe} | {one.release} | {' | '.join(map(str, counts))} |")
    wrong = [
        f"{one.recipe} on {one.release}: {line}" for one in found for line in (*one.unknown, *one.refused, *one.differ)
    ]
    stages, overrides = sum(one.stages for one in found), sum(one.overrides for one in found)
    print(f"\nStages: {stages}, overrides: {overrides}. Refused, or otherwise than the recipe says: {len(wrong)}.")
    print("\n".join(["", *(f"- {line}" for line in wrong)]) if wrong else "", end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
