"""Does a student learn from four teachers what each of them learnt? Runs recipe tiny-ultra for several seeds.

    python benchmarks/tiny_ultra.py --seeds 1 2 3 4 5 > benchmarks/tiny_ultra.md

A seed takes up to eight minutes on two cores. Finished runs (results/ultra-seed<N>) are not trained again. Bounds, by
seed: each teacher is better than the student before on its own held-out rows, the distilled student is not worse than a
teacher on the teacher's rows by more than chance explains (95 % interval, paired by row), and it is better than the
student before in the mean. Of the stages, two are to train again where one teacher's rate changes. `--smoke` reads
the recipe and trains nothing.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd

from benchmarks.common import ROOT, checked, command_line, head, row, seconds_of
from scripts.recipe.load import load_recipe
from scripts.stage.tables import ROLLOUTS, read_table

RECIPE, STUDENT, DISTILLED = "config/recipes/tiny-ultra.yaml", "rlvr", "mopd"
TEACHERS = ("reasoning", "instructions", "rlhf", "swe")
MINUTES = 8
CHANGED = ("\n  rlhf:\n    algorithm", "\n  rlhf:\n    policy: {optimizer: {lr: 3.0e-4}}\n    algorithm")


def run_recipe(seed: int) -> tuple[Path, float | None]:
    """Run the recipe with one seed; return its results and the seconds, None of a finished run."""
    results = ROOT / f"results/ultra-seed{seed}"
    if (results / "report.html").is_file():
        return results, None
    config = ("--config", f"recipe={RECIPE}", f"seed={seed}", f"run={results.name}")
    return results, seconds_of("snakemake", "--quiet", "all", *config, "--", f"results/{results.name}/report.html")


def scores_of(results: Path) -> pd.DataFrame:
    """Return the rewards of the held-out rows, a column a stage, by the rows' blend and line."""
    tables = {
        stage: read_table(results / stage / "rollouts.parquet", ROLLOUTS).to_pandas().set_index(["split", "line"])
        for stage in ("sft", STUDENT, *TEACHERS, DISTILLED)
    }
    return pd.DataFrame({stage: table["reward_after"] for stage, table in tables.items()})


def interval(differences: pd.Series) -> tuple[float, float, float]:
    """Return the mean of paired differences and its 95 % interval."""
    mean, half = differences.mean(), 1.96 * differences.std() / len(differences) ** 0.5
    return mean, mean - half, mean + half


def judged(seed: int, results: Path, seconds: float | None) -> tuple[list[str], bool]:
    """Return the rows of a seed, and whether its scores keep to the bounds."""
    scores, lines, kept = scores_of(results), [], True
    for teacher in TEACHERS:
        own = scores.xs(teacher, level="split")
        gain, *_ = interval(own[teacher] - own[STUDENT])
        behind, low, high = interval(own[DISTILLED] - own[teacher])
        kept &= gain > 0 and high >= 0
        means = [f"{own[stage].mean():.3f}" for stage in ("sft", STUDENT, teacher, DISTILLED)]
        lines.append(row(seed, teacher, *means, f"{behind:+.3f} ({low:+.3f} to {high:+.3f})"))
    means = scores.groupby(level="split").mean().mean()
    kept &= means[DISTILLED] > means[STUDENT]
    told = "–" if seconds is None else f"{seconds:.0f} s"
    figures = [f"{means[stage]:.3f}" for stage in ("sft", STUDENT)]
    return [*lines, row(seed, f"mean, {told}", *figures, "", f"{means[DISTILLED]:.3f}", "")], kept


def stages_to_train(recipe: str, run: str) -> list[str]:
    """Return the stages that a dry run would train."""
    dry = checked("snakemake", "--dry-run", "--config", f"recipe={recipe}", f"run={run}")
    return sorted({*re.findall(r"^rule (?:train|merge):(?: stage=(\S+);)?", dry, re.M)})


def main() -> None:
    """Print the table; status 1 when a seed misses a bound."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    arguments = parser.parse_args()
    text = (ROOT / RECIPE).read_text(encoding="utf-8")
    if arguments.smoke:
        settings = load_recipe(ROOT / RECIPE).stages[DISTILLED]
        print(f"{DISTILLED} distils {', '.join(settings.roles.values())} into {settings.parent}")
        sys.exit(settings.starts != [STUDENT, *TEACHERS] or text.count(CHANGED[0]) != 1)
    seeds = arguments.seeds
    runs = [(seed, *run_recipe(seed)) for seed in seeds]
    found = [judged(*run) for run in runs]
    changed = ROOT / "build/tiny-ultra.yaml"
    changed.parent.mkdir(exist_ok=True)
    changed.write_text(text.replace(*CHANGED).replace("seed: 1\n", f"seed: {seeds[0]}\n", 1), encoding="utf-8")
    again = stages_to_train(str(changed), f"ultra-seed{seeds[0]}")
    print("Held-out scores (greedy) of recipe tiny-ultra by seed: each teacher's own rows, and the mean of all.\n")
    print(f"Made by `python benchmarks/tiny_ultra.py --seeds {' '.join(map(str, seeds))}`, 2 CPU cores.\n")
    print(head("seed", "rows of", "sft", "student", "teacher", "distilled", "distilled less teacher, 95 %"))
    print("\n".join(line for lines, _ in found for line in lines))
    is_kept = all(kept for _, kept in found) and again == sorted(["rlhf", DISTILLED])
    print(f"\nWith another rate of teacher rlhf, {' and '.join(again)} train again, of {len(TEACHERS) + 3} stages.")
    in_time = all((seconds or 0) <= 60 * MINUTES for *_, seconds in runs)
    words = {True: "kept", False: "MISSED"}
    print("Bounds: teachers above the student, the distilled within chance of each, its mean above the student's: ")
    print(f"{words[is_kept]}; {MINUTES} minutes: {words[in_time]}.")
    sys.exit(not (is_kept and in_time))


if __name__ == "__main__":
    main()
