"""All faults by name, in the order of benchmarks/faults.md."""

from tests.slurm import faults_around, faults_within  # noqa: F401 - each enters its faults
from tests.slurm.fault import FAULTS, Fault, Outcome, suffer

__all__ = ["FAULTS", "Fault", "Outcome", "suffer"]
