"""The stages of backend `trl`, by algorithm."""

from scripts.backends.trl.distillation import DistillationSettings
from scripts.backends.trl.grpo import GrpoSettings
from scripts.backends.trl.merging import MergeSettings
from scripts.backends.trl.preferences import DpoSettings, KtoSettings, MpoSettings, RewardSettings
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
