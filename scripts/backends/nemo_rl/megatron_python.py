"""The Python that has Megatron in NeMo-RL's images, which the driver's own has not: the converters need it.

Every release of envs/nemo-rl.yaml builds its images alike (nemo_rl/utils/prefetch_venvs.py): the environment of each
actor lies below NEMO_RL_VENV_DIR under the actor's class. Where an image lacks it, uv builds one, over a network.
"""

import shutil
import subprocess
from functools import cache

VENVS = "/opt/ray_venvs"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
CHOICE = f"""\
venv="${{NEMO_RL_VENV_DIR:-{VENVS}}}/{WORKER}"
if [ -x "$venv/bin/python" ]; then
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
  exec "$venv/bin/python" "$@"
elif command -v uv > /dev/null; then
  echo "$venv is not in this image, so uv builds it, for which it needs a network" >&2
  exec uv run --extra mcore python "$@"
fi
echo "error: this image has neither $venv nor uv, so no Python with Megatron; \
build it with nemo_rl/utils/prefetch_venvs.py, as upstream's Dockerfile does" >&2
exit 1
"""


def with_megatron(arguments: list[str]) -> list[str]:
    """The command that runs Python with these arguments in a container, where it can import Megatron."""
    return ["bash", "-c", CHOICE, "python", *arguments]


@cache
def has_megatron(image: str) -> bool | None:
    """Whether an image holds that environment where images have it; None: this machine cannot look into it."""
    if not image.startswith("/") or shutil.which("unsquashfs") is None:
        return None
    python = f"{VENVS}/{WORKER}/bin/python"
    done = subprocess.run(
        ["unsquashfs", "-l", image, python.lstrip("/")],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return python in done.stdout if done.returncode == 0 else None
