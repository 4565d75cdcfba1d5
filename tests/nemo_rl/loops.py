"""The same start of a driver by NeMo-RL's real loops on a CPU and by the stand-in; what is left, told in the same words."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.backends.nemo_rl.checkpoints import seal_finished
from scripts.backends.nemo_rl.command import hydra_value
from scripts.backends.nemo_rl.metrics import StepLog
from scripts.backends.nemo_rl.outcome import cause_of
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.train import KILLED
from scripts.model.processor import make_tokenizer
from scripts.recipe.yaml_file import leaves
from scripts.stage.training_folder import TrainingFolder
from tests.slurm.nemo_rl import make_checkout
from tests.slurm.processes import PATH

CPU = Path(__file__).with_name("cpu")
GRPO = ("examples/nemo_gym/run_grpo_nemo_gym.py", "examples/nemo_gym/nemotron-3-super/stage1_rlvr.yaml")
MOPD = (GRPO[0], "examples/nemo_gym/nemotron-3-ultra/mopd.yaml")
DPO = ("examples/run_dpo.py", "examples/configs/dpo.yaml")
SFT = ("examples/run_sft.py", "examples/configs/sft.yaml")
AGENT, CHOICE = "math_with_judge_simple_agent", "mcqa_simple_agent"
TEACHERS = {AGENT: "reasoning", CHOICE: "choice"}
ANSWER = {"role": "assistant", "content": "7"}
FAULTS = {"raise": "error", "die": "die", "refit": "refit_failed"}  # in the stand-in's words
WAITING = re.compile(r"Buffer empty or not enough groups|Wait iteration")
PATIENCE = 20  # lines that say so, two or one a second, before a driver is taken to wait for ever
FIRST_PATIENCE = 120  # before the first step, while the collector of rollouts still imports torch
LIMIT = 400.0
GYM = ("resources_servers/math_with_judge", "responses_api_agents/simple_agent", "responses_api_models/vllm_model")
OF_CHOICE = "resources_servers/mcqa"
LEFT_OUT = (
    *("jailbreak_detection", "safety_judge_model", "nl2bash_judge_model", "inverse_if", "multichallenge", "lc_judge"),
    *("equivalence_llm_judge", "policy_model_reasoning_off", "genrm_compare_resources_server", "genrm_model"),
    *("code_gen", "math_with_judge", "effort_levels"),
)
ALSO_LEFT_OUT = ("abstention", "rdkit_chemistry_agent", "math_formal_lean_refinement_agent")  # of MOPD


@dataclass(frozen=True)
class Start:
    """A start of a driver: the step to train to, a fault by name with its step, whether its deadline comes at once."""

    most: int = 1000
    fault: tuple[str, int] | None = None
    at_once: bool = False
    epochs: int = 1


def rows_of(numbers: range) -> list[dict[str, Any]]:
    """Questions of arithmetic, one a number."""
    rows = []
    for number in numbers:
        question = f"the larger of {number} and 3"
        rows.append(
            {
                "agent_ref": {"type": "responses_api_agents", "name": AGENT},
                "question": question,
                "expected_answer": str(max(number, 3)),
                "responses_create_params": {"input": [{"role": "user", "content": question}]},
            }
        )
    return rows


def choices_of(numbers: range) -> list[dict[str, Any]]:
    """Questions with two options, one a number."""
    rows = []
    for number in numbers:
        asked = f"the larger: A: {number}\nB: 3"
        told = {"options": [{"A": str(number)}, {"B": "3"}], "grading_mode": "strict_single_letter_boxed"}
        rows.append(
            {
                "agent_ref": {"type": "responses_api_agents", "name": CHOICE},
                "question": asked,
                "expected_answer": "A" if number > 3 else "B",
                "responses_create_params": {"input": [{"role": "user", "content": asked}]},
                "uuid": str(number),
                **told,
            }
        )
    return rows


def write_teachers(directory: Path, steps: int) -> None:
    """Two teachers of the tiny model's shape, and rows of both environments for so many steps of two."""
    for seed, name in enumerate(TEACHERS.values(), start=1):
        write_model(directory / name, seed)
    pairs = zip(rows_of(range(steps)), choices_of(range(steps)), strict=True)
    lines = [json.dumps(row) + "\n" for pair in pairs for row in pair]
    (directory / "mixed.jsonl").write_text("".join(lines))
    (directory / "mixed-val.jsonl").write_text("".join(lines[:2]))


def write_model(directory: Path, seed: int = 0) -> None:
    """A tiny model with its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **size, **tokens)
    LlamaForCausalLM(config).save_pretrained(directory)


def write_inputs(directory: Path, steps: int) -> None:
    """A tiny model, and rows, pairs and conversations for so many steps of two."""
    write_model(directory / "model")
    rows = rows_of(range(2 * steps))
    pairs = [{"prompt": row["question"], "chosen": "7", "rejected": "no"} for row in rows]
    chats = [{"messages": [*row["responses_create_params"]["input"], ANSWER]} for row in rows]
    for name, lines in (("rows", rows), ("pairs", pairs), ("chats", chats)):
        for suffix, some in (("", lines), ("-val", lines[:2])):
            (directory / f"{name}{suffix}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))


def write_gym(directory: Path, python: Path) -> None:
    """Folders for Gym's servers as its images have them, each with a Python environment, which is one for all."""
    for server in (*GYM, OF_CHOICE):
        (directory / server).mkdir(parents=True)
        (directory / server / ".venv").symlink_to(python.parent.parent)


class Loops:
    """One of the two; `train` starts its driver in a run's directory and waits for its end."""

    def __init__(self, inputs: Path, release: str) -> None:
        self.inputs, self.release = inputs, release_of(release)

    def command(self, kind: str, start: Start, run: Path) -> list[str]:
        """The driver's command without what is asked of this one alone."""
        program, config = {"dpo": DPO, "sft": SFT, "mopd": MOPD}.get(kind, GRPO)
        data = {"dpo": "pairs", "sft": "chats", "mopd": "mixed"}.get(kind, "rows")
        section = kind if kind in ("dpo", "sft") else "grpo"
        is_static = section != "grpo"
        told = {
            "policy.model_name": self.inputs / "model",
            "policy.tokenizer.name": self.inputs / "model",
            "policy.train_global_batch_size": 2 if is_static else 4,
            "data.num_workers": 1,
            "checkpointing.checkpoint_dir": run / "checkpoints",
            "checkpointing.save_period": 1,
            "checkpointing.keep_top_k": 3,
            "checkpointing.metric_name": "null",
            "checkpointing.checkpoint_must_save_by": "00:00:00:01" if start.at_once else "null",
            "logger.log_dir": run / "logs",
            "logger.tensorboard_enabled": "true",
            "logger.wandb_enabled": "false",
            "cluster.num_nodes": 1,
            "cluster.gpus_per_node": 1 if is_static else 2,
            f"{section}.max_num_steps": start.most,
        }
        paths = {"train": self.inputs / f"{data}.jsonl", "validation": self.inputs / f"{data}-val.jsonl"}
        if kind == "sft":
            data = leaves(self.release.sft_data)
            told |= {
                key: value.format(**paths) if isinstance(value, str) else hydra_value(value) for key, value in data
            }
            told |= {"policy.tokenizer.chat_template": "default", "checkpointing.metric_name": "val:val_loss"}
            told |= {"checkpointing.higher_is_better": "false"}
        else:
            told |= {f"data.{part}.data_path": path for part, path in paths.items()}
        if is_static:
            told |= {f"{section}.val_period": 2, f"{section}.val_global_batch_size": 2}
            told[f"{section}.max_num_epochs"] = start.epochs
        else:
            told |= {"grpo.num_prompts_per_step": 2, "grpo.num_generations_per_prompt": 2}
            told["grpo.async_grpo.enabled"] = str(kind in ("async", "mopd")).lower()
            told |= self._of_teachers() if kind == "mopd" else {"grpo.seq_logprob_error_threshold": "null"}
        return [program, f"--config={config}", *(f"{key}={value}" for key, value in told.items())]

    def _of_teachers(self) -> dict[str, Any]:
        """The settings of MOPD: a teacher an environment, each on a node of its own."""
        opd = "on_policy_distillation"
        each = f"{opd}.non_colocated_teachers.default_teacher_cfg"
        groups = ("tensor_model", "context", "pipeline_model", "expert_model")
        return {
            "cluster.num_nodes": 1 + len(TEACHERS),
            "cluster.segment_size": "null",
            f"{each}.num_nodes": 1,
            f"{each}.gpus_per_node": 1,
            **{f"{each}.{group}_parallel_size": 1 for group in groups},
            f"{opd}.default_teacher_alias": "null",
            f"++{opd}.strict_agent_name_match": "true",
            f"{opd}.teacher_model_by_agent_name": "null",  # or the release's own would stay
            f"++{opd}.teacher_model_by_agent_name": hydra_value(
                {agent: str(self.inputs / name) for agent, name in TEACHERS.items()}
            ),
        }

    def train(self, kind: str, start: Start, run: Path) -> dict[str, Any]:
        """Start a driver and say how it ended; one that waits for ever is told to end."""
        run.mkdir(parents=True, exist_ok=True)
        log = run / f"driver-{len(list(run.glob('driver-*')))}.log"
        with log.open("w") as output:
            process = self.start(kind, start, run, output)
            try:
                waits = _watch(process, log)
            finally:
                process.kill()
        cause = cause_of(log, run / "no-cluster.log", run)
        status = "killed" if process.returncode in KILLED else process.returncode
        return {"waits": waits, "status": status, "cause": cause and cause.what} | left(run)

    def start(self, kind: str, start: Start, run: Path, output: Any) -> subprocess.Popen:
        """Start the driver."""
        raise NotImplementedError


class StandIn(Loops):
    """The stand-in, without Ray."""

    def __init__(self, inputs: Path, release: str) -> None:
        super().__init__(inputs, release)
        self.checkout = make_checkout(inputs / "stand-in", release)

    def start(self, kind: str, start: Start, run: Path, output: Any) -> subprocess.Popen:
        """Start the driver."""
        told = ["++stand_in.ray=false", "++stand_in.step_seconds=0.6"]
        if start.fault:
            name, step = start.fault
            told += [f"++stand_in.fault={FAULTS[name]}", f"++stand_in.at={step}"]
        command = ["python", "-W", "ignore", *self.command(kind, start, run), *told]
        environment = os.environ | {"PATH": PATH}
        return subprocess.Popen(command, cwd=self.checkout, env=environment, stdout=output, stderr=output)


class Real(Loops):
    """A release's own loops, Gym and Ray, in an environment for the CPU; a context that ends what it started."""

    def __init__(self, inputs: Path, checkout: Path, python: Path) -> None:
        super().__init__(inputs, checkout.name)
        self.checkout, self.python = checkout, python
        self.port, self.ray_port = _free_port(), _free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{CPU}:{checkout}",
            "RAY_ADDRESS": f"127.0.0.1:{self.ray_port}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
            "NRL_IGNORE_VERSION_MISMATCH": "1",
            "NEMO_GYM_VENV_DIR": str(inputs / "gym"),
            "PERSISTENT_CACHE": str(inputs / "cache"),
            "STAGECOACH_ENDPOINT": f"http://127.0.0.1:{self.port}/v1",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
        }
        write_gym(inputs / "gym", python)

    def __enter__(self) -> "Real":
        head = [
            *(
                self.python.with_name("ray"),
                "start",
                "--head",
                f"--port={self.ray_port}",
                "--num-gpus=4",
                "--num-cpus=16",
            ),
            *("--object-store-memory=200000000", "--include-dashboard=false", "--disable-usage-stats", "--block"),
        ]
        answers = [self.python, CPU / "endpoint.py", str(self.port), self.inputs / "model", "1.0"]
        self.servers = []
        for name, command in (("ray", head), ("endpoint", answers)):
            with (self.inputs / f"{name}.log").open("w") as output:
                # In the inputs' folder, where Ray's workers then write what a config places by a relative path
                told = {"cwd": self.inputs, "env": self.environment, "stdout": output, "stderr": output}
                self.servers.append(subprocess.Popen(command, **told, start_new_session=True))
        deadline = time.monotonic() + 60
        while not all(_listens(port) for port in (self.ray_port, self.port)):
            if time.monotonic() > deadline or any(server.poll() is not None for server in self.servers):
                self.__exit__()
                raise RuntimeError(f"Ray or the endpoint did not start; see {self.inputs}/ray.log and endpoint.log")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)

    def start(self, kind: str, start: Start, run: Path, output: Any) -> subprocess.Popen:
        """Start the driver."""
        told = ["policy.max_total_sequence_length=96", "logger.monitor_gpus=false"]
        if kind in ("dpo", "sft"):
            told += ["policy.train_micro_batch_size=1", "policy.make_sequence_length_divisible_by=1"]
            told += [f"{kind}.val_batches=1"]
        if kind == "dpo":
            told += ["data.validation.split=train"]
            told += [f"data.{part}.dataset_name=BinaryPreferenceDataset" for part in ("train", "validation")]
        elif kind != "sft":
            servers = ("responses_api_models/vllm_model/configs/vllm_model_for_training.yaml", f"{GYM[0]}/configs")
            more = f",{OF_CHOICE}/configs/mcqa.yaml" if kind == "mopd" else ""
            told += [
                "policy.megatron_cfg.enabled=false",
                "policy.generation.colocated.resources.gpus_per_node=1",
                "policy.generation.colocated.resources.num_nodes=1",
                "policy.generation.vllm_cfg.enable_vllm_metrics_logger=false",
                f"++env.nemo_gym.uv_venv_dir={self.inputs / 'gym'}",
                "env.nemo_gym.num_gpu_nodes=0",
                f"env.nemo_gym.config_paths=[{servers[0]},{servers[1]}/math_with_judge.yaml{more}]",
                "env.nemo_gym.policy_model.responses_api_models.vllm_model.num_workers=1",
                *(f"~env.nemo_gym.{name}" for name in (*LEFT_OUT, *(ALSO_LEFT_OUT if kind == "mopd" else ()))),
            ]
        command = [self.python, "-u", CPU / "drive.py", *self.command(kind, start, run), *told]
        if kind == "dpo":
            command = [re.sub(r"^(data\.(train|validation)\.data_path)", r"+\1", str(word)) for word in command]
        fault = " ".join(map(str, start.fault)) if start.fault else ""
        environment = self.environment | {"STAGECOACH_STEP_SECONDS": "2.5", "STAGECOACH_FAULT": fault}
        return subprocess.Popen(command, cwd=self.checkout, env=environment, stdout=output, stderr=output)


def _watch(process: subprocess.Popen, log: Path) -> bool:
    """Wait for a driver's end; whether it waited for ever, or for too long, and was told to end."""
    began = time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        _, trained, last = log.read_text(errors="replace").rpartition("Training Results")
        if len(WAITING.findall(last)) > (PATIENCE if trained else FIRST_PATIENCE) or time.monotonic() - began > LIMIT:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            return True
    return False


def left(run: Path) -> dict[str, Any]:
    """What a run's directory holds, and what our readers say of it."""
    folder = run / "checkpoints"
    checkpoints = sorted(path.name for path in folder.glob("*")) if folder.exists() else []
    seal_finished(TrainingFolder(run))
    steps = sorted(int(path.parent.name[5:]) for path in folder.glob("step_*/files.json"))
    found: dict[str, Any] = {"checkpoints": checkpoints, "sealed": steps, "reached": max(steps, default=0)}
    if steps:
        newest = folder / f"step_{steps[-1]}"
        files = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
        found["files"] = sorted({re.sub(r"^(policy/\w+)/.*", r"\1", name) for name in files} - {"policy/optimizer"})
        info = json.loads((newest / "training_info.json").read_text())
        counts = ("epoch", "step", "consumed_samples", "current_step", "current_epoch", "total_steps")
        found["info"] = {name: info[name] if name in counts else type(info[name]).__name__ for name in sorted(info)}
        loader = torch.load(newest / "train_dataloader.pt")
        main = loader["_snapshot"]["_main_snapshot"]
        found["loader"] = {
            "keys": sorted(loader),
            "snapshot": sorted(loader["_snapshot"]),
            "yielded": loader["_snapshot"]["_snapshot_step"] + loader["_steps_since_snapshot"],
            "rows": main["_sampler_iter_state"]["samples_yielded"],
            "finished": loader["_iterator_finished"],
        }
    output = run / "metrics.jsonl"
    StepLog(run / "logs", output, measures_kl=False)
    lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    found["lines"] = [line["step"] for line in lines]
    found["columns"] = sorted({name for line in lines for name in line})
    return found


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
