"""Which Python converts: chosen in the container by a real shell."""

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.backends.nemo_rl.export import WORKER, with_megatron

AWKWARD = ["-c", "import sys; print(sys.argv[1:])", "a b", "$HOME", "'; exit 7 #"]


def run(venvs: Path, path: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command where environments lie in `venvs` and programs in `path`."""
    bash, *rest = with_megatron(arguments)
    command = [shutil.which(bash), *rest]
    environment = {"NEMO_RL_VENV_DIR": str(venvs), "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_images_environment_serves_and_is_first_in_the_path_of_what_it_starts(tmp_path):
    (tmp_path / "all venvs").mkdir()
    (tmp_path / "all venvs" / WORKER).symlink_to(sys.prefix)
    done = run(tmp_path / "all venvs", "/nowhere", AWKWARD)
    assert (done.stdout, done.returncode) == (f"{AWKWARD[2:]}\n", 0)
    told = "import os; print(os.environ['PATH'], os.environ['VIRTUAL_ENV'])"
    venv = tmp_path / "all venvs" / WORKER
    assert run(tmp_path / "all venvs", "/nowhere", ["-c", told]).stdout == f"{venv}/bin:/nowhere {venv}\n"


def test_without_it_uv_is_asked_for_megatrons_extra_and_the_log_says_that_this_takes_a_network(tmp_path):
    uv = tmp_path / "uv"
    uv.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n")
    uv.chmod(0o755)
    done = run(tmp_path / "none", str(tmp_path), AWKWARD)
    assert done.stdout == f"{['run', '--extra', 'mcore', 'python', *AWKWARD]}\n"
    assert (
        done.stderr == f"{tmp_path}/none/{WORKER} is not in this image, so uv builds it, for which it needs a network\n"
    )


def test_where_neither_is_one_line_says_so(tmp_path):
    done = run(tmp_path, "/nowhere", AWKWARD)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr == (
        f"error: this image has neither {tmp_path}/{WORKER} nor uv, so no Python with Megatron; build it with "
        "nemo_rl/utils/prefetch_venvs.py, as upstream's Dockerfile does\n"
    )
