"""NeMo-RL's real loop of on-policy distillation (MOPD) on a CPU, killed in a save and gone on with.

Real are the driver, loop, loss, advantage, routing, collector, replay buffer, checkpoints, logger, Gym and Ray of the
pinned main; policy, generator and teachers are classes for the CPU.
"""

import re
from pathlib import Path

from tests.nemo_rl.loops import TEACHERS, Real, Start, write_inputs, write_teachers
from tests.production import CHECKOUTS, PYTHON, needs_nemo_rl

pytestmark = needs_nemo_rl
STEPS = 4


def test_a_student_of_two_teachers_that_is_killed_in_a_save_goes_on(tmp_path):
    write_inputs(tmp_path, STEPS)
    write_teachers(tmp_path, 3 * STEPS)  # the collector runs ahead, and a kill loses its rows
    run = tmp_path / "run"
    with Real(tmp_path, Path(CHECKOUTS, "main").resolve(), Path(PYTHON).absolute()) as loops:
        killed = loops.train("mopd", Start(fault=("die", 2)), run)
        whole = loops.train("mopd", Start(most=STEPS), run)
    assert killed["status"] == "killed" and killed["sealed"] == [1], killed
    assert whole["status"] == 0 and whole["sealed"][-1] == STEPS and whole["lines"] == [*range(1, STEPS + 1)], whole
    for log in run.glob("driver-*.log"):
        asked = re.findall(r"\[teacher_logprob\] group=(\w+) samples=(\d+)", log.read_text())
        assert {name for name, _ in asked} == {*TEACHERS}, "each environment's own teacher"
