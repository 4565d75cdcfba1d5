"""What Snakemake asks before the first job and at the end of each: by the real Snakemake on a small Snakefile."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SNAKEFILE = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from scripts.controller.retries import Decision
from scripts.controller.scheduling import Answers, ask
from scripts.errors import UserError

def note(text):
    with open("told", "a") as file:
        print(text, file=file)

def before_jobs():
    note("before the first job, which is " + ("there" if Path("first").exists() else "not there"))
    if Path("refuse").exists():
        raise UserError("too much")

def on_failure(rule, wildcards, is_last):
    note(f"{{rule}} {{wildcards}} failed{{', the last' * is_last}}")
    decisions = {{"cut": Decision(True, "cut: once more"), "broken": Decision(False)}}
    return decisions.get(wildcards.get("name"))

ask(workflow, Answers(
    before_jobs=before_jobs,
    on_failure=on_failure,
    after_failure=lambda job, line: note(f"after {{job.rule.name}}: {{line}}, attempt {{job.attempt}}"),
    after_success=lambda job: note(f"{{job.rule.name}} is done"),
    on_term=lambda: None,
))

rule all:
    input: "cut", "first"

rule first:
    output: "first"
    shell: "touch first"

rule train:
    output: "{{name}}"
    wildcard_constraints: name="cut|broken|other"
    retries: 3
    shell: "echo tried >> {{wildcards.name}}.tries; [ {{wildcards.name}} = cut ] && [ -e cut.again ] && touch cut || {{{{ touch cut.again; exit 1; }}}}"
"""


CALLS = {
    "loud": ["all"],
    "quiet": ["all", "--quiet", "all"],
    "refused": ["all"],
    "dry": ["all", "--dry-run"],
    "broken": ["broken", "other", "--keep-going"],
}
PROGRAM = """
import json, os, sys
from contextlib import redirect_stderr
from pathlib import Path
from snakemake.cli import main

ended = {}
for name, arguments in json.loads(sys.argv[1]).items():
    os.chdir(Path(sys.argv[2], name))
    with open("said", "w") as said, redirect_stderr(said):
        try:
            main(["--cores", "1", "--no-hooks", *arguments])
        except SystemExit as end:
            ended[name] = end.code
print(json.dumps(ended))
"""


class Called:
    """What a call has said, how it ended, and what it asked."""

    def __init__(self, folder, status):
        self.folder, self.status = folder, status
        self.said, self.told = (folder / "said").read_text(), (folder / "told").read_text().splitlines()


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The calls, one after the other in one process, as of Snakemake's API; hooks are off, as with `--no-hooks`."""
    root = tmp_path_factory.mktemp("calls")
    for name in CALLS:
        (root / name).mkdir()
        (root / name / "Snakefile").write_text(SNAKEFILE.format(root=str(ROOT)))
        (root / name / "told").touch()
    (root / "refused/refuse").touch()
    command = [sys.executable, "-c", PROGRAM, json.dumps(CALLS), str(root)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    ended = json.loads(done.stdout.splitlines()[-1])
    return {name: Called(root / name, ended[name]) for name in CALLS}


@pytest.mark.parametrize("name", ["loud", "quiet"])
def test_every_moment_is_asked_about_and_a_job_that_is_tried_again_is_a_line(calls, name):
    call = calls[name]
    assert call.status == 0, call.said
    assert call.told[0] == "before the first job, which is not there"
    assert sorted(call.told[1:]) == [
        "after train: cut: once more, attempt 1",
        "all is done",
        "first is done",
        "train is done",
        "train {'name': 'cut'} failed",
    ]
    assert (call.folder / "cut.tries").read_text() == "tried\n" * 2
    assert "Error in rule" not in call.said
    assert ("cut: once more" in call.said) == (name == "loud")


def test_a_refusal_ends_the_call_before_the_first_job_and_a_dry_run_asks_nothing(calls):
    refused = calls["refused"]
    assert refused.status != 0 and "too much" in refused.said
    assert not (refused.folder / "first").exists() and not (refused.folder / "cut.tries").exists()
    assert (calls["dry"].status, calls["dry"].told) == (0, [])


def test_a_job_that_is_not_tried_again_ends_with_snakemakes_error_and_one_left_to_it_by_its_retries(calls):
    call = calls["broken"]
    assert call.status != 0 and "Error in rule train" in call.said
    assert (call.folder / "broken.tries").read_text() == "tried\n"
    assert (call.folder / "other.tries").read_text() == "tried\n" * 4
    assert "after train: None, attempt 1000000" in call.told
