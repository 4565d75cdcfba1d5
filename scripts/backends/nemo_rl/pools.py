"""What tells NeMo-RL of judges outside its Ray cluster, and starts pools by NVIDIA's run_in_allocation.sh.

run_in_allocation.sh starts the replicas in a heterogeneous job's second component, a load balancer for each pool on
the first node, then ray.sub in the first component, and ends all with the first that ends. No GPU has tried it.
"""

from pathlib import Path
from typing import Any

import httpx2

from scripts.backends.nemo_rl.runtime import Runtime
from scripts.backends.nemo_rl.training import Judge
from scripts.errors import UserError

TOOLS = Path("tools/external_gym_vllm")
SCRIPT = TOOLS / "run_in_allocation.sh"
PYTHON = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker/bin/python"
SERVED = "model"  # upstream's name of every pool's model
FIRST_PORT = 1321  # below the ports that kernels lend, in a range that main leaves to generators besides vLLM
ANSWER_SECONDS = 30.0


def pools_of(runtime: Runtime) -> dict[str, Judge]:
    """Return the judges to be started, by name."""
    return {name: judge for name, judge in runtime.settings.judges.items() if judge.replicas is not None}


def _prefix(name: str) -> str:
    """Return a pool's name for run_in_allocation.sh, which keeps its variables from ray.sub's."""
    return f"JUDGE_{name.upper()}"


def _placeholder(name: str) -> str:
    return f"__{_prefix(name)}_BASE_URL__"


def judge_overrides(runtime: Runtime) -> dict[str, Any]:
    """Return address and model of each judge's server of Gym; run_in_allocation.sh puts pools' addresses in."""
    told: dict[str, Any] = {}
    for name, judge in runtime.settings.judges.items():
        key = f"env.nemo_gym.{judge.server}"
        told[f"++{key}.base_url"] = judge.address or _placeholder(name)
        told[f"{key}.model"] = judge.model if judge.address else SERVED
    return told


def pool_environment(runtime: Runtime, base_logs: Path) -> dict[str, str]:
    """Return run_in_allocation.sh's variables; empty without pools. UserError where pools would not see their files."""
    if not (pools := pools_of(runtime)):
        return {}
    told = {
        "EXTERNAL_VLLM_POOLS": " ".join(map(_prefix, pools)),
        "EXTERNAL_VLLM_TOOLS_DIR_HOST": str(runtime.checkout / TOOLS),
        "EXTERNAL_VLLM_SHARED_ROOT": shared_root(runtime, base_logs),
        "RAY_SUB": str(runtime.checkout / "ray.sub"),
    }
    venvs = runtime.site.environment.get("NEMO_RL_VENV_DIR", "/opt/ray_venvs")
    for port, (name, judge) in enumerate(pools.items(), FIRST_PORT):
        values = {
            "DISPLAY_NAME": name,
            "MODEL": judge.model,
            "CONTAINER": runtime.image,
            "VLLM_PYTHON": f"{venvs}/{PYTHON}",
            "REPLICAS": str(judge.replicas),
            "TENSOR_PARALLEL_SIZE": str(judge.nodes_per_replica * runtime.site.slurm.gpus_per_node),
            "LB_PORT": str(port),
            "URL_PLACEHOLDER": _placeholder(name),
            "SERVED_MODEL_NAME": SERVED,
            "VLLM_ARGS": "\n".join(judge.arguments),
            "ENV_VARS": "\n".join(f"{variable}={value}" for variable, value in judge.environment.items()),
        }
        told |= {f"{_prefix(name)}_{key}": value for key, value in values.items()}
    return told


def shared_root(runtime: Runtime, base_logs: Path) -> str:
    """Return the mount that shows pools' containers all that they read; UserError where no single one does."""
    site, checkout = runtime.site, runtime.checkout
    needed = {"the stage's logs": base_logs, f"nemo_rl.checkouts.{runtime.release.name}": checkout}
    models = {f"judges.{name}.model": Path(judge.model) for name, judge in pools_of(runtime).items()}
    needed |= {what: model for what, model in models.items() if model.is_absolute()}
    if home := site.environment.get("HF_HOME"):
        needed["environment.HF_HOME"] = Path(home)
    mounts = [mount.split(":")[:2] for mount in site.mounts]
    same = [Path(source) for source, target in mounts if source.rstrip("/") == target.rstrip("/") != ""]
    for root in same:
        if all(path.is_relative_to(root) for path in needed.values()):
            return str(root)
    places = ", ".join(f"{what} ({path})" for what, path in needed.items())
    raise UserError(
        f"site {site.name}: mounts: containers of judges see a single mount, with equal paths inside and outside, and "
        f"no mount holds all of {places}; keep all in a single mount, or mount a folder above"
    )


def ask_addresses(runtime: Runtime) -> None:
    """Ask each judge at an address for its models; UserError where one does not answer, or serves other models."""
    for name, judge in runtime.settings.judges.items():
        if judge.address is None:
            continue
        at = f"{runtime.name}: judges.{name}.address"
        try:
            answer = httpx2.get(f"{judge.address}/models", timeout=ANSWER_SECONDS, trust_env=False)
            served = [model["id"] for model in answer.raise_for_status().json()["data"]]
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{at}: {judge.address}/models does not answer as vLLM does from the job's first node ({error!r}); "
                "start the judge there, or mend the address"
            ) from None
        if judge.model not in served:
            raise UserError(f"{at}: {judge.address} serves {', '.join(served)}, not {judge.model}; mend model")
