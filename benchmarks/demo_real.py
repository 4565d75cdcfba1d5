"""Does a real language model learn at each stage, whatever the seed? Runs `make demo-real`'s chain for several seeds.

    python benchmarks/demo_real.py --seeds 1 2 3 4 5 > benchmarks/demo_real.md

A seed takes seven minutes on two idle cores. Each held-out score is the share of 96 rows, on questions that no
stage is trained on, whose instructions are all obeyed; a change stands with its interval of 95 %. Finished runs
(results/smollm2-seed<N>) are read, not trained again, and have no times. `--picture docs/demo_real.svg` draws the
scores, whole and by instruction. `--smoke` reads the finished chain among the tests.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from benchmarks.common import RECORDED, ROOT, command_line, head, peak_memory, row

MINUTES, MEMORY_GB = 20, 6
RECIPE = "config/recipes/smollm2.yaml"
STAGES = ("sft", "rlvr")


def scored(stage: Path) -> tuple[float, float, dict[str, float]]:
    """Return a stage's score before and after it, and the change with its interval."""
    mean = json.loads((stage / "eval.json").read_text())["mean"]
    return mean["before"], mean["after"], mean["change"]


def said(change: dict[str, float]) -> str:
    """Write a change with its interval."""
    return f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})"


def run_chain(seed: int) -> tuple[Path, str]:
    """Run one seed's chain; return its results, and its minutes, CPU-minutes and GB as cells."""
    results = ROOT / f"results/smollm2-seed{seed}"
    if (results / "report.html").exists():
        return results, " |  | "
    chain = ("snakemake", "--quiet", "--config", f"recipe={RECIPE}", f"run={results.name}", f"seed={seed}")
    used, begun = cpu_seconds(), time.monotonic()
    process = subprocess.Popen(chain, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = peak_memory(process, 0.5)
    if process.wait():
        sys.exit(f"{' '.join(chain)}: ended with {process.returncode}")
    minutes, cpu = (time.monotonic() - begun) / 60, (cpu_seconds() - used) / 60
    return results, f"{minutes:.1f} | {cpu:.1f} | {peak / 1e9:.1f}"


def cpu_seconds() -> float:
    """Return what the ended children of this process took."""
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def stage_seconds(stage: Path) -> float:
    """Return the median seconds of a stage's steps."""
    lines = (stage / "run/metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines)


def by_tag(results: Path) -> dict[str, tuple[float, float, float]]:
    """Return the scores of base, SFT and GRPO, of all rows and by tag."""
    first, last = (json.loads((results / stage / "eval.json").read_text())["environments"] for stage in STAGES)
    first, last = (next(iter(environments.values())) for environments in (first, last))
    pairs = {"all": (first, last)} | {tag: (first["tags"][tag], last["tags"][tag]) for tag in last.get("tags", {})}
    return {tag: (sft["before"], sft["after"], grpo["after"]) for tag, (sft, grpo) in pairs.items()}


def picture(seeds: list[dict[str, tuple[float, float, float]]]) -> str:
    """Draw the mean over the seeds as bars, and each seed as a dot."""
    left, width, bar = 190, 400, 9
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {40 * len(seeds[0]) + 30}" font-family="sans-serif" '
        'font-size="13" role="img"><title>Share of held-out prompts obeyed: base, SFT, GRPO</title>'
        '<rect width="100%" height="100%" fill="white"/>'
    ]
    colours = {"base": "#999999", "SFT": "#56b4e9", "GRPO": "#0072b2"}
    for at, (name, colour) in enumerate(colours.items()):
        drawn.append(f'<rect x="{left + 80 * at}" y="6" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{left + 16 + 80 * at}" y="17">{name}</text>')
    for place, tag in enumerate(seeds[0]):
        top = 28 + 40 * place
        drawn.append(f'<text x="{left - 8}" y="{top + 19}" text-anchor="end">{tag.split(":")[-1]}</text>')
        for at, colour in enumerate(colours.values()):
            found, y = [seed[tag][at] for seed in seeds], top + at * (bar + 1)
            mean = statistics.mean(found)
            drawn.append(f'<rect x="{left}" y="{y}" width="{width * mean:.1f}" height="{bar}" fill="{colour}"/>')
            end = left + 8 + width * max(found)
            drawn.append(f'<text x="{end:.1f}" y="{y + 8}" font-size="10">{mean:.2f}</text>')
            dots = (f'<circle cx="{left + width * each:.1f}" cy="{y + bar / 2}" r="1.5"/>' for each in found)
            drawn += dots if len(seeds) > 1 else ()
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    """Print the table; status 1 when a seed does not learn at each stage."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    seeds = [0] if arguments.smoke else arguments.seeds
    lines, learnt, tags = [], True, []
    for seed in seeds:
        results, costs = (RECORDED / "results/recorded", " |  | ") if arguments.smoke else run_chain(seed)
        (base, sft, first), (_, last, second) = (scored(results / stage) for stage in STAGES)
        seconds = ", ".join(f"{stage_seconds(results / stage):.1f}" for stage in STAGES)
        lines.append(row(seed, f"{base:.3f}", f"{sft:.3f}", said(first), f"{last:.3f}", said(second), seconds, costs))
        tags.append(by_tag(results))
        learnt = learnt and min(first["low"], second["low"]) > 0
        print(lines[-1], file=sys.stderr, flush=True)
    if arguments.picture:
        arguments.picture.write_text(picture(tags), encoding="utf-8")
    print("Held-out scores of SmolLM2-135M-Instruct by `config/recipes/smollm2.yaml`, by seed.\n")
    print(f"Made by `python benchmarks/demo_real.py --seeds {' '.join(map(str, seeds))}`, 2 CPU cores.\n")
    names = ("seed", "base", "SFT", "change", "GRPO", "change", "seconds a step", "minutes", "CPU-minutes", "GB")
    print(head(*names))
    print("\n".join(lines))
    print(f"\nBounds: every interval above 0, {MINUTES} minutes, {MEMORY_GB} GB: {'learnt' if learnt else 'MISSED'}.")
    sys.exit(not learnt and not arguments.smoke)


if __name__ == "__main__":
    main()
