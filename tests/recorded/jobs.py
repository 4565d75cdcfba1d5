"""What Snakemake would note of every job of the recipes: ``python -m tests.recorded.jobs FILE`` writes hashes.

Snakemake runs a job again whose inputs or params are others than it noted, whatever else is the same.
"""

import json
import sys
from pathlib import Path

from scripts.files import sha256_text, write_json

CASES = (
    *(("tiny", "laptop"), ("tiny", "cluster"), ("tiny-nano", "laptop"), ("tiny-omni", "laptop")),
    *(("super3", "h100"), ("nano3", "h100"), ("omni3", "h100"), ("steps-rlvr", "h100")),
)


def noted(recipe: str, site: str) -> dict[str, tuple[list[str], list[str]]]:
    """The params and inputs of each job that a bare dry run plans, as Snakemake notes them; by rule and wildcards."""
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, Quietness, ResourceSettings

    config = {"recipe": f"config/recipes/{recipe}.yaml", "site": f"config/sites/{site}.yaml", "run": "recorded"}
    with SnakemakeApi(OutputSettings(dryrun=True, quiet={Quietness.ALL})) as api:
        loaded = api.workflow(ResourceSettings(cores=1), ConfigSettings(config=config), snakefile=Path("Snakefile"))
        loaded.dag(DAGSettings()).execute_workflow(executor="dryrun")
        dag = loaded._workflow.dag
        record = loaded._workflow.persistence
        return {
            " ".join([job.rule.name, *job.wildcards_dict.values()]): (record._params(job), record._input(job))
            for job in dag.jobs
        }


def jobs() -> dict[str, dict[str, str]]:
    """By recipe and site: the hash of each job's params and inputs, in a tree in which nothing has run."""
    return {
        f"{recipe} {site}": {
            job: sha256_text(json.dumps(told))[:12] for job, told in sorted(noted(recipe, site).items())
        }
        for recipe, site in CASES
    }


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), jobs())
