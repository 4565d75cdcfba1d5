"""What the filter on Snakemake's logger makes of its records: of mistakes, of a dry run and of the end."""

import logging
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from scripts.controller.console import Console, job_line, shortened
from scripts.errors import UserError


def workflow(**shown):
    output = {"dryrun": False, "printshellcmds": False, "verbose": False} | shown
    return SimpleNamespace(output_settings=SimpleNamespace(**output))


def record(event=None, msg="", **fields):
    return logging.makeLogRecord({"event": event, "msg": msg, "levelno": logging.ERROR} | fields)


JOB = {
    "rule_name": "train",
    "wildcards": {"stage": "sft"},
    "reason": "Missing output files: a, b; Input files updated by another job: c",
    "resources": {"nodes": 2, "gres": "", "trainings": 1},
    "is_checkpoint": False,
    "indent": False,
}


def test_a_planned_job_is_a_line_and_its_resources_a_second_one():
    assert job_line(JOB) == "rule train: stage=sft; not there yet\n    resources: nodes=2"
    shown = record(LogEvent.JOB_INFO, **JOB)
    assert Console(workflow(dryrun=True)).filter(shown) and (shown.event, shown.msg) == (None, job_line(JOB))
    whole = record(LogEvent.JOB_INFO, **JOB)
    assert Console(workflow(dryrun=True, printshellcmds=True)).filter(whole) and whole.event == LogEvent.JOB_INFO


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Forced execution", "Forced execution"),
        ("Updated input files: a, b, c, d, e", "Updated input files: a, b, c and 2 more"),
        ("Input files updated by another job: a", "Input files updated by another job: a"),
    ],
)
def test_a_reason_names_three_files(reason, said):
    assert shortened(reason) == said


def test_the_plan_stands_before_the_end_of_a_dry_run_and_repetitions_go():
    console = Console(workflow(dryrun=True))
    console.plan = lambda: "the plan"
    end = record(msg="This was a dry-run (flag -n).")
    assert console.filter(end) and end.msg == "the plan\n\nThis was a dry-run (flag -n)."
    assert not console.filter(record(msg="Reasons:\n    (check"))


def test_a_mistake_is_a_line_and_what_a_job_has_said_is_not_said_again():
    console = Console(workflow())
    try:
        raise UserError("config.yaml: no")
    except UserError:
        mistake = record(LogEvent.ERROR, "UserError in file ...")
        assert console.filter(mistake) and mistake.msg == "error: config.yaml: no"
    assert not console.filter(record(LogEvent.ERROR, "CalledProcessError in file rules/train.smk"))


def test_the_end_of_the_last_job_says_where_the_report_is(caplog):
    caplog.set_level(logging.INFO, "snakemake.logging")
    console = Console(workflow())
    console.at_end = lambda: "The report is here"
    console.filter(record(LogEvent.PROGRESS, done=1, total=2))
    assert not caplog.messages
    console.filter(record(LogEvent.PROGRESS, done=2, total=2))
    assert caplog.messages == ["The report is here"]


def test_a_second_call_in_a_process_replaces_the_filter():
    logger = logging.getLogger("snakemake.logging")
    for _ in range(2):
        console = Console(workflow())
        console.install()
    assert [known for known in logger.filters if isinstance(known, Console)] == [console]
    logger.removeFilter(console)
