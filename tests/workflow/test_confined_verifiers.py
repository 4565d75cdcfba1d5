"""No response escapes, hangs or forges the verdict of a verifier in a confined process (`tests.unit.hostile`)."""

import json
import os
import re
import subprocess
import sys
import sysconfig

import pytest

from tests.conftest import ROOT
from tests.unit import hostile


def test_the_confined_verifiers_survive_what_is_meant_for_them():
    assert not any(hostile.confined(seconds=0.3).values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_confined_verifiers_survive_it_as_another_user_too():
    """By the system's Python, since nobody may not read root's; it must be of the version of our packages."""
    program = ["/usr/bin/python3", "-m", "tests.unit.hostile", "--confined", "--seconds", "0.3"]
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("platlib")])
    done = subprocess.run(
        program,
        cwd="/",
        env={"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("nobody cannot read this repository, or the packages are not of the system's Python")
    assert done.stdout == "{}\n", done.stderr


AUDIT = """
import json, signal, sys
import sympy.physics.units  # which makes symbols of its own when it is imported
from scripts.rewards.environments import math
from tests.unit import hostile

class TooSlow(BaseException):
    pass

def stop(*_):
    raise TooSlow

def note(event, arguments):
    if listens and event in ("compile", "os.system", "subprocess.Popen", "os.exec", "pickle.find_class"):
        given = arguments[0]
        ran.add(given.decode() if isinstance(given, bytes) else given if isinstance(given, str) else type(given).__name__)

ran, listens = set(), False
math.warm_up()
sys.addaudithook(note)
signal.signal(signal.SIGALRM, stop)
texts = [text for text in hostile.HOSTILE.values() if len(text) < 3000]
for form in ("The answer is {}.", "${}$", r"\\boxed{{\\text{{{}}}}}", "The final answer is: 1*{} I hope", "= 2 {}"):
    texts += [form.format(expression) for expression in hostile.PYTHON if len(expression) < 3000]
for text in texts + list(hostile.of_parts(300)):
    listens = True
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        math.equal("17", text)
    except (TooSlow, Exception):
        pass
    finally:
        listens = False
        signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps(sorted(ran)))
"""


def test_of_a_mathematical_answer_python_is_given_numbers_and_operators_alone():
    done = subprocess.run([sys.executable, "-c", AUDIT], cwd=ROOT, capture_output=True, text=True, check=False)
    ran = json.loads(done.stdout)
    given = [text for text in ran if text.startswith(("Integer", "Float", "-Integer", "-Float"))]
    assert len(given) > 10, done.stderr
    of_sympy = ("from sympy import *", "def monomial_", "Expression", "E ")
    others = [text for text in ran if not re.fullmatch(r"(Integer|Float|[\s\d.+*/()'-])*", text)]
    assert [text for text in others if not text.startswith(of_sympy)] == []
