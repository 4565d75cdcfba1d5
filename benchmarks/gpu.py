"""What backend `trl` does on GPUs, each setting trained for a few steps: what passed, and what it took.

    python benchmarks/gpu.py --model Qwen/Qwen3-0.6B     (benchmarks/gpu.sh installs what it needs and calls it)

Every setting is the recipe tiny-pretrained with a few changes, in results/gpu-<name>/ with a store of its own, through
Snakemake to a published checkpoint, the most telling first. The weights of `killed-and-resumed` are compared with those
of `lora`, whose settings it has. A setting without its GPUs or package is skipped; when --minutes are over, one that
trains is ended and the rest is left out. results/gpu.md is the page of results, whole after each setting.
`--accelerator cpu` tries the script itself where there is no GPU; `--smoke` loads every setting's recipe.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
import yaml
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, head, row
from scripts.recipe.load import load_recipe

RECIPE = ROOT / "config/recipes/tiny-pretrained.yaml"
VLLM = ROOT / ".venv-vllm/bin/python"
STEPS, OVER = 4, "ended: the minutes are over"
HALF, SHARDED = {"precision": "bfloat16"}, {"dtensor_cfg": {"enabled": True}}
LORA, NF4 = {"lora": {"dim": 8, "alpha": 16}}, {"lora": {"dim": 8, "alpha": 16, "quantization": "nf4"}}


@dataclass
class Setting:
    """Changes of the policy of both stages (`policy`) or of one; what it needs; words that its failure has to have.

    `is_killed`: struck while it trains and called again; `is_crowded`: beside a program that leaves it 1 GiB.
    """

    name: str
    policy: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] = field(default_factory=dict)
    rlvr: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    package: str | None = None
    is_killed: bool = False
    is_crowded: bool = False
    fails_with: str | None = None


def by_vllm(name: str, policy: dict[str, Any] = HALF, gpus: int = 1, **generation: Any) -> Setting:
    """A setting in which vLLM samples the rollouts, placed as `generation` says."""
    return Setting(name, policy, rlvr={"generation": {"backend": "vllm", **generation}}, gpus=gpus, package="vllm")


SETTINGS = (
    Setting("lora", HALF | LORA),
    by_vllm("vllm"),
    Setting("killed-and-resumed", HALF | LORA, is_killed=True),
    Setting("fsdp2", HALF | SHARDED, gpus=2),
    Setting("all-weights"),
    Setting("qlora", HALF | NF4, package="bitsandbytes"),
    by_vllm("vllm-lora", HALF | LORA),
    Setting("out-of-memory", gpus=1, is_crowded=True, fails_with="out of memory"),
    Setting("skip-padding", HALF | LORA | {"skip_padding": True}),
    Setting("checkpointing", HALF | {"dtensor_cfg": {"activation_checkpointing": True}, "train_micro_batch_size": 1}),
    by_vllm("fsdp2-vllm", HALF | SHARDED, gpus=2),
    by_vllm("vllm-sleeping", vllm_cfg={"enable_sleep_mode": True}),
    Setting("bfloat16", HALF | {"optimizer": {"name": "adamw_torch"}}),
    Setting("copies", HALF, gpus=2),
    Setting("fsdp2-lora", HALF | SHARDED | LORA, gpus=2),
    Setting("flash-attention", HALF | {"attn_implementation": "flash_attention_2"}, gpus=1, package="flash_attn"),
    Setting("sampling", HALF, rlvr={"generation": {"top_k": 20, "min_p": 0.05}}),
    Setting("fsdp2-qlora", HALF | SHARDED | NF4, gpus=2, package="bitsandbytes"),
    by_vllm("vllm-parallel", gpus=2, vllm_cfg={"tensor_parallel_size": 2}),
)


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with changes, section by section."""
    return values | {
        key: merged(values.get(key) or {}, change) if isinstance(change, dict) else change
        for key, change in changes.items()
    }


def write_recipe(setting: Setting, model: str, path: Path) -> None:
    """The recipe of a setting: few steps, a checkpoint after every second, no adapters unless the setting has some."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    recipe["model"] = {"name": model}
    for name, stage in recipe["stages"].items():
        stage["policy"].pop("lora", None)
        stage[stage["algorithm"]]["max_num_steps"] = STEPS
        stage["checkpointing"] = {"save_period": 2}
        stage["gate"] = []
        stage["policy"] = merged(merged(stage["policy"], setting.policy), getattr(setting, name))
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def results_of(name: str) -> Path:
    """The folder of a setting's results."""
    return ROOT / f"results/gpu-{name}"


def lacking(setting: Setting, gpus: int) -> str | None:
    """What the setting needs and this machine has not."""
    if setting.gpus > gpus:
        return f"{setting.gpus} GPU{'s' if setting.gpus > 1 else ''}"
    is_there = VLLM.exists() if setting.package == "vllm" else not setting.package or find_spec(setting.package)
    return None if is_there else f"package {setting.package}"


def train(setting: Setting, site: Path, model: str, log: Path, seconds: float) -> str | None:
    """Train a setting's stages in so many seconds; why it failed, None where it did not, OVER for lack of time."""
    results = results_of(setting.name)
    shutil.rmtree(results, ignore_errors=True)
    recipe = site.with_name(f"{setting.name}.yaml")
    write_recipe(setting, model, recipe)
    config = [f"recipe={recipe}", f"site={site}", f"results=results/{results.name}"]
    command = ["snakemake", "--config", *config, "--", f"results/{results.name}/rlvr/ckpt"]
    ends = time.monotonic() + seconds
    with log.open("w", encoding="utf-8") as output:
        if setting.is_killed:
            call(command, output, ends, results / "rlvr/run/checkpoints/step_2")
        status = call(command, output, ends)
    text = log.read_text(encoding="utf-8")
    if status is None:
        return OVER
    if setting.fails_with is not None:
        return None if status and setting.fails_with in text else "did not fail as it should"
    if setting.is_killed and "resumes from step" not in text:
        return "did not resume"
    return f"exit status {status}" if status else None


def call(command: list[str], output: TextIO, ends: float, killed_at: Path | None = None) -> int | None:
    """Return a command's status; None where it was killed, when the time was over or a path was there."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    while process.poll() is None:
        if time.monotonic() > ends or (killed_at and killed_at.exists()):
            kill_session(process.pid)
            process.wait()
            return None
        time.sleep(0.1)
    return process.returncode


def kill_session(leader: int) -> None:
    """Kill every process of a session, the trainings that Snakemake started among them."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


@contextmanager
def crowd(is_crowded: bool) -> Iterator[None]:
    """Hold the first GPU's memory but for 1 GiB."""
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 2**30, dtype=torch.uint8, device="cuda") if is_crowded else None
    yield
    del taken
    torch.cuda.empty_cache()


def difference(setting: Setting, other: str) -> str:
    """The largest difference of any weight of two settings' last checkpoints."""
    weights = "rlvr/ckpt/weights/adapter_model.safetensors"
    ours, others = (results_of(name) / weights for name in (setting.name, other))
    if not others.is_file():
        return f"not compared: {other} was not trained"
    pairs = zip(load_file(ours).values(), load_file(others).values(), strict=True)
    most = max((one - another).abs().max().item() for one, another in pairs)
    return f"weights differ from {other}'s by at most {most:.1e}" if most else f"weights equal {other}'s"


def seconds_a_step(setting: Setting) -> str:
    """The last step's seconds of each stage."""
    logs = [results_of(setting.name) / stage / "run/metrics.jsonl" for stage in ("sft", "rlvr")]
    last = [json.loads(log.read_text().splitlines()[-1])["seconds"] for log in logs if log.is_file()]
    return ", ".join(f"{each:.2f}" for each in last)


class Watch(threading.Thread):
    """Keeps the most memory that any GPU had in use, as nvidia-smi says."""

    QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        """Ask four times a second."""
        while shutil.which(self.QUERY[0]):
            used = subprocess.run(self.QUERY, capture_output=True, text=True, check=False).stdout.split()
            self.most = max([self.most, *map(int, used)])
            time.sleep(0.25)


def check_recipes(model: str) -> None:
    """Load every setting's recipe, as a training would."""
    with tempfile.TemporaryDirectory() as folder:
        for setting in SETTINGS:
            path = Path(folder, f"{setting.name}.yaml")
            write_recipe(setting, model, path)
            print(f"{setting.name:20} stages: {', '.join(load_recipe(path).stages)}")


def main() -> None:
    """Command line of the program."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a repository of the hub")
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument("--accelerator", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--logs", type=Path, default=ROOT / "results/gpu-logs")
    arguments = parser.parse_args()
    if arguments.smoke:
        check_recipes(arguments.model)
        return
    gpus = torch.cuda.device_count() if arguments.accelerator == "cuda" else 0
    if arguments.accelerator == "cuda" and gpus == 0:
        sys.exit(f"torch {torch.__version__} sees no GPU here; --accelerator cpu tries the script alone")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = [torch.cuda.get_device_name(number) for number in range(gpus)] or ["CPU"]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    page = [
        f"# {len(names)} x {names[0]}",
        "",
        f"Python {sys.version.split()[0]}, {versions}; {arguments.model}; {STEPS} steps a stage, SFT and GRPO.",
        "",
        head("setting", "result", "seconds", "the last step's seconds: SFT, GRPO", "most MiB in use on a GPU"),
    ]
    print("\n".join(page), flush=True)
    failed, ends, watch = 0, time.monotonic() + 60 * arguments.minutes, Watch()
    watch.start()
    for setting in SETTINGS:
        if arguments.only not in setting.name:
            continue
        left, costs = ends - time.monotonic(), ("", "", "")
        if lack := lacking(setting, gpus):
            result = f"skipped: needs {lack}"
        elif left < 0:
            result = "left out: the minutes are over"
        else:
            site = arguments.logs / "site.yaml"
            values = {"name": "gpu", "threads": 4 if gpus else 2, "accelerator": arguments.accelerator}
            values |= {"processes": max(1, setting.gpus)} if gpus else {}
            values |= {"vllm_python": str(VLLM)} if VLLM.exists() else {}
            site.write_text(yaml.safe_dump(values), encoding="utf-8")
            log, watch.most = arguments.logs / f"{setting.name}.log", 0
            with crowd(setting.is_crowded):
                why = train(setting, site, arguments.model, log, left)
            failed += why not in {None, OVER}
            compared = f", {difference(setting, 'lora')}" if setting.is_killed and why is None else ""
            result = f"passed{compared}" if why is None else why if why == OVER else f"FAILED: {why}, see {log}"
            costs = (f"{ends - time.monotonic() - left:.0f}".lstrip("-"), seconds_a_step(setting), watch.most or "")
        page.append(row(setting.name, result, *costs))
        print(page[-1], flush=True)
        arguments.logs.with_name("gpu.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
