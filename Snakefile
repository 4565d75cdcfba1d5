# Stagecoach: a language model through its post-training stages. Rules only wire files; the work is in scripts/.
from snakemake.utils import min_version

min_version("9.27.1")


configfile: "config/config.yaml"


report: "docs/captions/report.rst"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"


localrules:
    all,
    report_html,


onsuccess:
    if Path(f"{RESULTS}/report.html").exists():
        print(f"The report is {RESULTS}/report.html")


rule all:
    default_target: True
    input:
        f"{RESULTS}/report.html",
        f"{RESULTS}/summary.csv",
        expand(f"{RESULTS}/{{stage}}/gate.json", stage=STAGES),
