"""The stages of backend `trl`, by algorithm."""

from scripts.backends.trl.dpo import DpoSettings, MpoSettings
from scripts.backends.trl.grpo import GrpoSettings
from scripts.backends.trl.merging import MergeSettings
from scripts.backends.trl.sft import SftSettings

STAGES = {"sft": SftSettings, "grpo": GrpoSettings, "dpo": DpoSettings, "mpo": MpoSettings, "merge": MergeSettings}
