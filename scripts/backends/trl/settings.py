"""The stages of backend `trl`, by algorithm."""

from scripts.backends.trl.distillation import DistillationSettings
from scripts.backends.trl.dpo import DpoSettings, MpoSettings
from scripts.backends.trl.grpo import GrpoSettings
from scripts.backends.trl.kto import KtoSettings
from scripts.backends.trl.merging import MergeSettings
from scripts.backends.trl.reward import RewardSettings
from scripts.backends.trl.sft import SftSettings

STAGES = {
    "sft": SftSettings,
    "grpo": GrpoSettings,
    "distillation": DistillationSettings,
    "dpo": DpoSettings,
    "mpo": MpoSettings,
    "kto": KtoSettings,
    "reward": RewardSettings,
    "merge": MergeSettings,
}
