"""Hash the inputs and settings of every job of the recipes: ``python -m tests.recorded.jobs FILE`` writes the table.

Snakemake runs a job again that has other inputs than it noted, or a settings file with another text.
"""

import json
import sys
from pathlib import Path

from scripts.files import sha256_text, write_json

CASES = (
    *(("tiny", "laptop"), ("tiny", "cluster"), ("tiny-nano", "laptop"), ("tiny-omni", "laptop")),
    *(("super3", "h100"), ("nano3", "h100"), ("omni3", "h100"), ("steps-rlvr", "h100")),
)


def noted(recipe: str, site: str) -> dict[str, list[str]]:
    """Return the inputs of each job that a bare dry run plans, a settings file with its text; by rule and wildcards."""
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, Quietness, ResourceSettings

    config = {"recipe": f"config/recipes/{recipe}.yaml", "site": f"config/sites/{site}.yaml", "run": "recorded"}
    with SnakemakeApi(OutputSettings(dryrun=True, quiet={Quietness.ALL})) as api:
        loaded = api.workflow(ResourceSettings(cores=1), ConfigSettings(config=config), snakefile=Path("Snakefile"))
        loaded.dag(DAGSettings()).execute_workflow(executor="dryrun")
        return {
            " ".join([job.rule.name, *job.wildcards_dict.values()]): sorted(map(_with_settings, job.input))
            for job in loaded._workflow.dag.jobs
        }


def _with_settings(path: str) -> str:
    is_settings = path.startswith("results/recorded/settings/")
    return f"{path} {Path(path).read_text()}" if is_settings else str(path)


def jobs() -> dict[str, dict[str, str]]:
    """By recipe and site: the hash of each job's inputs, in a tree in which nothing has run."""
    return {
        f"{recipe} {site}": {
            job: sha256_text(json.dumps(told))[:12] for job, told in sorted(noted(recipe, site).items())
        }
        for recipe, site in CASES
    }


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), jobs())
