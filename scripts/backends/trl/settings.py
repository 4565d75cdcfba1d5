"""The stages of backend `trl`, by algorithm."""

from scripts.backends.merge.merging import MergeSettings
from scripts.backends.trl.grpo import GrpoSettings
from scripts.backends.trl.offline import DpoSettings, KtoSettings, MpoSettings, RewardSettings, SftSettings
from scripts.backends.trl.on_policy import DistillationSettings

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
