"""The driver's command and the environment of ray.sub for one stage.

Both follow upstream's launchers, but for the list in docs/nemo_rl.md. ray.sub splits srun options at spaces, so sites
and configs refuse paths with spaces; other values are quoted for Hydra and then for the shell. No token is part of a
command; tokens stay in the job's environment.

Judges outside the Ray cluster are started by NVIDIA's run_in_allocation.sh: the replicas in a heterogeneous job's
second component, a load balancer for each pool on the first node, then ray.sub in the first component. All end with
the first that ends. No GPU has tried it.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from scripts.backends.nemo_rl.judges import Judge
from scripts.backends.nemo_rl.loops import SECTION_OF_TEACHERS
from scripts.backends.nemo_rl.runtime import Runtime, mark_check
from scripts.backends.nemo_rl.settings import ROUTING
from scripts.errors import UserError
from scripts.recipe.stage_settings import Checkpointing
from scripts.recipe.yaml_file import leaves

SETTINGS = (
    *("sft", "grpo", "dpo", "mpo", "rm", "distillation", "on_policy_distillation"),
    *("loss_fn", "policy", "teacher", "data", "env", "logger"),
)
PREWARM = (
    "import sys; from transformers import AutoConfig, AutoTokenizer; name = sys.argv[1]; "
    "AutoConfig.from_pretrained(name, trust_remote_code=True); "
    "AutoTokenizer.from_pretrained(name, trust_remote_code=True, use_fast=True)"
)
SANDBOX_PORT = "6000"
TOOLS = Path("tools/external_gym_vllm")
START_POOLS = TOOLS / "run_in_allocation.sh"
VLLM_PYTHON = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker/bin/python"
SERVED = "model"  # upstream's name of every pool's model
FIRST_PORT = 1321  # below the ports that kernels lend, in a range that main leaves to generators besides vLLM
ANSWER_SECONDS = 30.0
KEEP_ALL = 1_000_000  # as upstream writes it
LEAST_SECONDS = 1  # NeMo-RL looks at the deadline after each step, and saves the step
DRIVER_STARTED = "logs/driver_started"
# Those of main's ray.sub: earlier ones lie among the ports that the kernel lends to outgoing connections (trap 100).
PORTS = {
    **{"NODE_MANAGER_PORT": "1301", "OBJECT_MANAGER_PORT": "1303", "RUNTIME_ENV_AGENT_PORT": "1305"},
    **{"DASHBOARD_AGENT_GRPC_PORT": "1307", "METRICS_EXPORT_PORT": "1309", "DASHBOARD_AGENT_LISTEN_PORT": "1311"},
    **{"PORT": "1200", "RAY_CLIENT_SERVER_PORT": "1201", "MIN_WORKER_PORT": "2000", "MAX_WORKER_PORT": "2999"},
}
INSTALL_APPTAINER = Path(__file__).with_name("install_apptainer.sh")
"""For images before v0.7.0: five tries, then the cluster ends."""
FAIL_SETUP = """\
fail() {
  printf 'error: %s: %s\\n' "$(uname -n)" "$1" | tee "${0%/*}/ENDED"
  kill "$PPID"
  exit 1
}
"""
"""ray.sub ignores the status of the setup on a node, so a failure kills the parent, the step's shell, and writes ENDED
beside the text's file, which ends the other nodes and says why."""
FAIL_DRIVER = """fail() { echo "error: $1"; exit 1; }"""
NO_APPTAINER = (
    "no Apptainer after five tries at {}; let the nodes reach it, or name an image that has it (site's nemo_rl.images)"
)
_PLAIN = re.compile(r"[A-Za-z0-9_./@-]*[A-Za-z_/@-][A-Za-z0-9_./@-]*")
_OTHER_MEANING = {"true", "false", "null", "inf", "nan", "yes", "no", "on", "off"}
_NUMBER_LIKE = re.compile(r"[+-]?[0-9_.]+([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Launch:
    """One start of a stage's driver.

    `model`: a folder or a repository. `data`: the folder of the splits as the driver reads them; `run`: the folder of
    checkpoints and logs. `seed`: None keeps the config's. `save_by`: seconds since the epoch at which the last
    checkpoint must be whole, less the time from start to first step; None without a limit. `schedule_steps`: the length
    of the learning rate's schedule where not max_num_steps, which is a text only in a command to be shown. `mark`: of
    the image, where known. `teachers`: the folder or repository of each teacher by role; `environments`: of the
    training rows, as far as known.
    """

    runtime: Runtime
    model: str
    data: Path
    run: Path
    max_num_steps: int | str
    seed: int | None = None
    save_by: float | None = None
    schedule_steps: int | None = None
    mark: str | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    environments: tuple[str, ...] = ()

    @property
    def checks(self) -> list[str]:
        """Return the shell text that refuses another image than the site's, calling `fail`."""
        return [mark_check(self.mark, self.runtime.image)] if self.mark else []


def hydra_overrides(launch: Launch) -> list[str]:
    """Return the driver's overrides in order; the last wins, so the user's come last.

    The driver's shell computes the deadline at the start, so there is no override for the deadline.
    """
    runtime, stage, nemo_rl = launch.runtime, launch.runtime.settings, launch.runtime.nemo_rl
    nested: dict[str, Any] = {}
    if "skip_prefetched_venvs" in runtime.release.can and "nemo_gym" in stage.entry:
        # not every config of such a release has these keys
        nested |= {"++env.nemo_gym.uv_venv_dir": "/opt/gym_venvs", "++env.nemo_gym.skip_venv_if_present": True}
    nested |= {
        "policy.model_name": launch.model,
        "++policy.tokenizer.name": launch.model,  # some configs name the tokenizer of another model
        "checkpointing.checkpoint_dir": str(launch.run / "checkpoints"),
        "logger.log_dir": str(launch.run / "logs"),
        "logger.tensorboard_enabled": True,
        "logger.wandb_enabled": nemo_rl.wandb_project is not None,
    }
    if nemo_rl.wandb_project is not None:
        nested |= {"logger.wandb.name": runtime.name, "logger.wandb.project": nemo_rl.wandb_project}
    if nemo_rl.wandb_entity is not None:  # no config names one
        nested["++logger.wandb.entity"] = nemo_rl.wandb_entity
    settings = {name: _filled(getattr(stage, name), launch) for name in SETTINGS}
    settings["distillation"] = {key: value for key, value in stage.distillation.items() if key not in ROUTING}
    added = _filled(stage.add, launch)
    nested |= stage.loop.defaults(stage)
    if settings["data"] == stage.data and added == stage.add:
        nested |= _filled(stage.loop.data_keys(runtime.release), launch)
    added = {f"+{section}": values for section, values in added.items()}
    teachers = stage.loop.teachers(launch)
    parts = (nested, settings, added, judge_overrides(runtime), _nodes(runtime), teachers, _steps(launch))
    overrides = [text for part in parts for text in overrides_of(part)]
    models = stage.loop.routes(launch)
    if models is not None:
        # once without and once with a value, since Hydra lays a mapping over the config's
        key = f"{SECTION_OF_TEACHERS}.teacher_model_by_agent_name"
        overrides += [f"{key}=null", f"{key}={hydra_value(models)}"]
    if stage.sif and nemo_rl.sif:
        overrides.append(f"sif_dir={hydra_value(nemo_rl.sif)}")
    overrides += stage.overrides
    if "names_automodel" not in runtime.release.can:
        return overrides
    kept = (text for text in overrides if not re.match(r"[+~]*policy\.dtensor_cfg\._v2\b", text))
    return [re.sub(r"^([+~]*policy\.)dtensor_cfg\b", r"\1automodel_cfg", text) for text in kept]


def overrides_of(settings: dict[str, Any]) -> Iterator[str]:
    """Yield ``key=value`` for each leaf of nested settings; nothing for an empty mapping."""
    return (f"{name}={hydra_value(value)}" for name, value in leaves(settings))


def hydra_value(value: Any) -> str:
    """Return a value in Hydra's grammar (hydra.cc/docs/advanced/override_grammar), parsed to the same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value) if math.isfinite(value) else str(value)  # inf, -inf, nan
    if isinstance(value, list | tuple):
        return f"[{','.join(hydra_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{hydra_value(str(key))}:{hydra_value(item)}' for key, item in value.items())}}}"
    return _text(str(value))


def _text(text: str) -> str:
    """Return a string, in single quotes unless the bare text is unambiguous.

    In quotes a backslash escapes a quote, and a backslash before a quote; before ``${`` a backslash stops OmegaConf
    from reading a reference.
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_MEANING and not _NUMBER_LIKE.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda found: found[1] * 2, text)
    return f"'{text}'"


def _filled(value: Any, launch: Launch) -> Any:
    """Return a setting with the splits' paths for ``{train}``, ``{validation}`` and ``{data}``."""
    if isinstance(value, dict):
        return {key: _filled(item, launch) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    for name, file in {"train": "train-split.jsonl", "validation": "val-split.jsonl", "data": ""}.items():
        value = value.replace(f"{{{name}}}", str(launch.data / file))
    return value


def _nodes(runtime: Runtime) -> dict[str, Any]:
    cluster, gpus = runtime.settings.cluster, runtime.site.slurm.gpus_per_node
    nodes: dict[str, Any] = {"cluster.num_nodes": cluster.num_nodes, "cluster.gpus_per_node": gpus}
    if cluster.generation_nodes:
        nodes["policy.generation.colocated.resources.num_nodes"] = cluster.generation_nodes
        nodes["policy.generation.colocated.resources.gpus_per_node"] = gpus
    if cluster.judge_nodes and runtime.release.keys.judge_nodes:
        nodes[runtime.release.keys.judge_nodes] = cluster.judge_nodes
    return nodes


def kept_checkpoints(checkpointing: Checkpointing) -> dict[str, int | None]:
    """Return NeMo-RL's keys of the checkpoints to keep, best first, and by step without a metric.

    The newest is always spared; v0.7.0 refuses null for all.
    """
    if checkpointing.keep_last_k is None or checkpointing.keep_steps:
        return {"checkpointing.keep_top_k": KEEP_ALL}
    kept = {"checkpointing.keep_top_k": checkpointing.keep_last_k + checkpointing.keep_top_k}
    return kept if checkpointing.keep_top_k else kept | {"checkpointing.metric_name": None}


def _steps(launch: Launch) -> dict[str, Any]:
    loop, checkpointing = launch.runtime.settings.loop.section, launch.runtime.settings.checkpointing
    steps: dict[str, Any] = {
        f"{loop}.max_num_steps": launch.max_num_steps,
        "checkpointing.enabled": True,
        "checkpointing.save_period": checkpointing.save_period,
        **kept_checkpoints(checkpointing),
    }
    if launch.seed is not None:
        steps[f"{loop}.seed"] = launch.seed
    if launch.schedule_steps is not None:
        # NeMo-RL derives the schedule of Megatron's optimizer from max_num_steps, and Megatron refuses a checkpoint of
        # another schedule unless it is told which one counts. Tried with megatron-core's scheduler alone, on a CPU.
        scheduler = "++policy.megatron_cfg.scheduler"
        steps[f"{scheduler}.lr_decay_iters"] = launch.schedule_steps
        steps[f"{scheduler}.override_opt_param_scheduler"] = False
        steps[f"{scheduler}.use_checkpoint_opt_param_scheduler"] = True
    return steps


def driver_command(launch: Launch) -> str:
    """Return the shell text that ray.sub runs on the head, in the checkout, once Ray is up.

    NeMo-RL counts ``checkpoint_must_save_by`` from the start of the training loop, so the shell computes the value from
    `save_by` when the driver starts, and notes the start among the logs.
    """
    runtime, settings = launch.runtime, launch.runtime.settings
    checkout, python = shlex.quote(str(runtime.checkout)), runtime.release.python.split()
    lines = ["set -eu", *([FAIL_DRIVER, *launch.checks] if launch.checks else []), f"cd {checkout}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in runtime.stated.items()]
    lines.append(f"date +%s > {shlex.quote(str(launch.run / DRIVER_STARTED))}")
    lines.append(f"export PYTHONPATH={checkout}${{PYTHONPATH:+:$PYTHONPATH}}")
    models = dict.fromkeys([launch.model, *launch.teachers.values()])
    lines += [shlex.join([*python, "-c", PREWARM, model]) for model in models]
    deadline = "checkpointing.checkpoint_must_save_by=null"
    if launch.save_by is not None:
        lines += [
            f"left=$(( {int(launch.save_by)} - $(date +%s) ))",
            f"[ $left -ge {LEAST_SECONDS} ] || left={LEAST_SECONDS}",
            "save_by=$(printf '%02d:%02d:%02d:%02d'"
            " $((left / 86400)) $((left / 3600 % 24)) $((left / 60 % 60)) $((left % 60)))",
        ]
        deadline = "checkpointing.checkpoint_must_save_by=\"'$save_by'\""
    overrides = [shlex.quote(override) for override in hydra_overrides(launch)]
    overrides.insert(len(overrides) - len(settings.overrides), deadline)
    program = shlex.join([*python, f"./{settings.entry}", "--config", settings.config])
    lines.append(" \\\n  ".join([f"exec {program}", *overrides]))
    return "\n".join(lines) + "\n"


def cluster_environment(launch: Launch, base_logs: Path, cpus: int | str) -> dict[str, str]:
    """Return the variables of ray.sub and of judges' pools besides Slurm's, with `cpus` of a node.

    Logs go to ``<base_logs>/<job id>-logs``.
    """
    runtime, release, slurm = launch.runtime, launch.runtime.release, launch.runtime.site.slurm
    own = {
        "COMMAND": driver_command(launch),
        "CONTAINER": runtime.image,
        "MOUNTS": ",".join(runtime.mounts),
        "GPUS_PER_NODE": str(slurm.gpus_per_node),
        "CPUS_PER_WORKER": str(cpus),  # some releases ask for 128 without, and srun waits for ever on smaller nodes
        "BASE_LOG_DIR": str(base_logs),
        **PORTS,
        "DEDICATED_RAY_HEAD": "0",  # 1 in a user's environment would take a node from those that were asked for
        **pool_environment(runtime, base_logs),
    }
    if runtime.settings.sandbox:
        own |= {
            "SANDBOX_CONTAINER": runtime.image_of("sandbox"),
            "SANDBOX_COMMAND": release.sandbox_command,
            "SANDBOX_ENV_VARS": f"NEMO_SKILLS_SANDBOX_PORT={SANDBOX_PORT}",
            **dict.fromkeys(("LISTEN_PORT", "NGINX_PORT", "NEMO_SKILLS_SANDBOX_PORT"), SANDBOX_PORT),
        }
    setup = launch.checks
    if release.apptainer:
        text = INSTALL_APPTAINER.read_text(encoding="utf-8").replace("{package}", shlex.quote(release.apptainer))
        setup = [*setup, text.replace("{failed}", shlex.quote(NO_APPTAINER.format(release.apptainer)))]
    if setup:
        own["SETUP_COMMAND"] = FAIL_SETUP + "\n".join(setup)
    return own


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
            "VLLM_PYTHON": f"{venvs}/{VLLM_PYTHON}",
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
