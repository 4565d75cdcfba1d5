"""A stand-in checkout of NeMo-RL, which launchers start as they would start the real one."""

import os
import shutil
import subprocess
from pathlib import Path

STAND_IN = Path(__file__).with_name("nemo_rl_stand_in")
CONFIG = Path("examples/nemo_gym/nemotron-3-super/stage1_rlvr.yaml")
OLD_CONFIG = Path("examples/configs/super/stage1_rlvr.yaml")  # where super-v3 has it
CONVERTERS = Path("examples/converters")
SUBMODULES = (
    "3rdparty/Gym-workspace/Gym",
    "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge/3rdparty/Megatron-LM",
)
REAL = "STAGECOACH_NEMO_RL"


def make_checkout(directory: Path, release: str = "v0.7.0", ray_sub: Path | None = None) -> Path:
    """Make a git repository of one commit in `directory`, which must not exist.

    `ray_sub` replaces its ray.sub; so does that of the release below the folder that STAGECOACH_NEMO_RL names. The
    real one asks for Ray's dashboard, so the packages of ray[default] must be in PYTHONPATH.
    """
    shutil.copytree(STAND_IN, directory, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "RELEASE").write_text(f"{release}\n")
    (directory / ".gitignore").write_text("__pycache__/\n/results/\n/logs/\n*-logs/\n*.out\n")
    if release == "super-v3":
        (directory / OLD_CONFIG).parent.mkdir(parents=True)
        (directory / CONFIG).rename(directory / OLD_CONFIG)
        converter = directory / CONVERTERS / "convert_megatron_to_hf_gpu.py"
        converter.rename(converter.with_name("convert_megatron_to_hf_super.py"))
    for submodule in SUBMODULES:
        (directory / submodule).mkdir(parents=True)
        (directory / submodule / "README.md").write_text("A stand-in for a submodule.\n")
    script = directory / "ray.sub"
    if real := ray_sub or (Path(os.environ[REAL], release, "ray.sub") if os.environ.get(REAL) else None):
        shutil.copy(real, script)
    elif release == "super-v3":
        lines = script.read_text().splitlines(keepends=True)
        script.write_text("".join(line for line in lines if "# since v0.7.0" not in line))
    script.chmod(0o755)
    return commit(directory, release)


def commit(directory: Path, message: str) -> Path:
    """Make a folder a git repository of one commit, the same one for the same files."""
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in {"NAME": "NeMo-RL", "EMAIL": "none@example.com", "DATE": "2026-01-01T00:00:00Z"}.items()
    }
    for command in (["init", "--quiet", "-b", "main"], ["add", "--all"], ["commit", "--quiet", "-m", message]):
        subprocess.run(["git", *command], cwd=directory, env=os.environ | identity, check=True)
    return directory
