# Stagecoach: a language model through its post-training stages. Rules only wire files; the work is in scripts/.
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.20.0")

here = workflow.current_basedir
if Path(str(here), "scripts").is_dir():
    sys.path.insert(0, str(here))
else:  # this file was fetched by Git: the code is the installed package's, of the same version
    version = (getattr(here, "tag", None) or "").removeprefix("v")
    try:
        import stagecoach
    except ImportError:
        pinned = f"stagecoach-workflow{version and f'=={version}'}"
        raise WorkflowError(f"Stagecoach is not installed beside Snakemake: python -m pip install {pinned}") from None
    if version:
        stagecoach.snakefile(version)
    sys.path.insert(0, str(stagecoach.ROOT))

from scripts.controller.console import Console

CONSOLE = Console(workflow)
CONSOLE.install()


configfile: "config/config.yaml"


report: "docs/captions/report.rst"


include: "rules/common.smk"
include: "rules/start.smk"
include: "rules/data.smk"
include: "rules/mmpr.smk"
include: "rules/layout.smk"
include: "rules/model.smk"
include: "rules/train.smk"
include: "rules/merge.smk"
include: "rules/evaluate.smk"
include: "rules/generate.smk"
include: "rules/benchmarks.smk"
include: "rules/quantize.smk"
include: "rules/sweep.smk"
include: "rules/report.smk"
include: "rules/publish.smk"


# On a cluster these run beside Snakemake: they take moments and no memory, and some decide whether nodes are asked for;
# the source comes from the network, which compute nodes often lack.
localrules:
    all,
    source,
    pretrained,
    preflight,
    lm_eval,
    tasks,
    metrics,
    written,
    gate,
    choose,
    choose_written,
    stage_page,
    generated_page,
    pages,
    report_html,
    card,
    track,


rule all:
    default_target: True
    input:
        f"{RESULTS}/report.html",
        f"{RESULTS}/summary.csv",
        COMPARISON,
        of_stages("gate.json", *(["tracking.json"] if CONFIG.tracking else []), *(["pushed.json"] if PUSHED else [])),
        of_stages("benchmarks.json", among=BENCHMARKED),
        of_stages("quantized/hf/record.json", among=QUANTIZED),
        expand(f"{RESULTS}/{{choice}}/choice.json", choice=RECIPE.choices),
