"""Torchrun over the processes of one node: ``python -m scripts.backends.trl.torchrun PROCESSES JOB.json``.

It leaves signals to the processes, which take them as requests to stop, and ends with the one that holds the stage.
"""

import ctypes
import signal
import sys

from torch.distributed.run import main as torchrun

from scripts.stage.stop import SIGNALS

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Command line of the program."""
    processes, job_file = sys.argv[1:]
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    options = ["--standalone", f"--nproc-per-node={processes}", "--signals-to-handle=SIGUSR2"]
    torchrun([*options, "-m", "scripts.backends.trl.process", job_file])


if __name__ == "__main__":
    main()
