"""Run an example script of NeMo-RL (the first argument) with the CPU's classes in the place of the GPUs'."""

import runpy
import sys
from contextlib import suppress

import cpu_classes
from nemo_rl.algorithms import dpo, grpo, sft
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

for actor in ACTOR_ENVIRONMENT_REGISTRY:
    ACTOR_ENVIRONMENT_REGISTRY[actor] = sys.executable  # else uv makes an environment for each
grpo.Policy, grpo.VllmGeneration = cpu_classes.CpuPolicy, cpu_classes.CpuGeneration
with suppress(ImportError):  # since main's MOPD
    from nemo_rl.models.policy import teacher_worker_group

    teacher_worker_group.TeacherWorkerGroup = cpu_classes.CpuTeacher
dpo.Policy = sft.Policy = cpu_classes.CpuPolicy
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
