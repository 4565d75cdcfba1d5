"""The entry of a recipe whose release trains on a CPU: runs the release's script of its place with the CPU's classes.

It lies at ``on_cpu/NAME`` in a checkout with the rest of its folder, and runs ``examples/nemo_gym/NAME``. Beside the
driver answers an endpoint for Gym's servers on all nodes. The fault that STAGECOACH_FAULT names happens once, while the
file that STAGECOACH_STRUCK names is not there.
"""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = f"examples/nemo_gym/{Path(__file__).name}"


def model_of(arguments: list[str]) -> str:
    """The folder of the model, by the driver's overrides."""
    return next(word.partition("=")[2] for word in arguments if word.startswith("policy.model_name="))


def strike_once() -> None:
    """Leave the fault out where it has happened."""
    struck = Path(os.environ.get("STAGECOACH_STRUCK", "/dev/null"))
    if struck.exists():
        os.environ.pop("STAGECOACH_FAULT", None)
    else:
        struck.touch()


def start_endpoint(model: str) -> None:
    """Start the endpoint; the container's end is its end."""
    with socket.socket() as one:
        one.bind(("", 0))
        port = str(one.getsockname()[1])
    subprocess.Popen([sys.executable, HERE / "endpoint.py", port, model, "1.0"])
    os.environ["STAGECOACH_ENDPOINT"] = f"http://{socket.gethostbyname(socket.gethostname())}:{port}/v1"


if __name__ == "__main__":
    strike_once()
    start_endpoint(model_of(sys.argv))
    os.environ["PYTHONPATH"] += f":{HERE}"  # Ray's workers unpickle the classes
    sys.argv.insert(1, SCRIPT)
    runpy.run_path(str(HERE / "drive.py"), run_name="__main__")
