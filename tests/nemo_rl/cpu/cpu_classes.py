"""NeMo-RL's policy and generator on a CPU: a small model that learns by the release's loss in the driver's process.

``STAGECOACH_FAULT`` is ``raise N``, ``die N`` (killed in the save after N calls of train) or ``refit N``;
``STAGECOACH_STEP_SECONDS`` is how long a step takes at least.
"""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import ray
import torch
from nemo_rl.algorithms.loss.utils import prepare_loss_input
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils import native_checkpoint
from transformers import AutoModelForCausalLM

FAULT = os.environ.get("STAGECOACH_FAULT", "")
SECONDS = float(os.environ.get("STAGECOACH_STEP_SECONDS", "0"))
torch.Tensor.cuda = lambda self, *_, **__: self


class _Optional:
    """Gives every method that the loops call around a step and that has nothing to do here."""

    PREFIXES = (
        *("prepare_", "finish_", "finalize_", "offload_", "start_", "stop_", "load_", "clear_"),
        *("invalidate_", "snapshot_"),
    )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(self.PREFIXES):
            raise AttributeError(name)
        return lambda *_, **__: True

    def shutdown(self) -> bool:
        return True

    def init_collective(self, *_: Any, **__: Any) -> list:
        return []


class Axes:
    def get_axis_size(self, _name: str) -> int:
        return 1


def logits_of(model, data) -> torch.Tensor:
    ids = data["input_ids"]
    mask = torch.arange(ids.shape[1])[None] < data["input_lengths"][:, None]
    return model(input_ids=ids, attention_mask=mask.long()).logits


def logprobs_of(model, data) -> torch.Tensor:
    with torch.no_grad():
        found = logits_of(model, data)[:, :-1].float().log_softmax(-1)
    found = found.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros_like(found[:, :1]), found], 1)


class CpuPolicy(_Optional):
    """The whole model in one process; its checkpoints are written by NeMo-RL's own native_checkpoint."""

    sharding_annotations = Axes()

    def __init__(self, cluster, config, tokenizer, weights_path=None, optimizer_path=None, **_: Any) -> None:
        self.cfg, self.tokenizer, self.calls = config, tokenizer, 0
        load = AutoModelForCausalLM.from_pretrained
        self.model, self.reference = (load(config["model_name"], dtype=torch.float32) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        if weights_path:
            parts = (self.optimizer, self.scheduler, str(optimizer_path)) if optimizer_path else (None, None, None)
            native_checkpoint.load_checkpoint(self.model, str(weights_path), *parts)

    def get_logprobs(self, data, **_: Any) -> BatchedDataDict:
        return BatchedDataDict({"logprobs": logprobs_of(self.model, data)})

    def get_reference_policy_logprobs(self, data, **_: Any) -> BatchedDataDict:
        return BatchedDataDict({"reference_logprobs": logprobs_of(self.reference, data)})

    def train(self, data, loss_fn, eval_mode=False, **_: Any) -> dict[str, Any]:
        if not eval_mode:
            self.calls += 1
            time.sleep(SECONDS)
        if f"raise {self.calls}" == FAULT:
            raise RuntimeError("a worker failed")
        rows = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        inputs, data = prepare_loss_input(logits_of(self.model, data), data, loss_fn)
        loss, measured = loss_fn(data=data, global_valid_seqs=rows, global_valid_toks=tokens, **inputs)
        norm = torch.tensor(0.0)
        if not eval_mode:
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        measured |= {"lr": 1e-4, "global_valid_seqs": rows.item(), "global_valid_toks": tokens.item()}
        return {
            "loss": loss.detach().reshape(1),
            "grad_norm": norm.reshape(1),
            "all_mb_metrics": {name: [value] for name, value in measured.items()},
        }

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None, **_: Any) -> None:
        parts = (self.optimizer, self.scheduler) if optimizer_path else (None, None)
        places = (weights_path, *parts, optimizer_path, self.tokenizer, tokenizer_path)
        native_checkpoint.save_checkpoint(self.model, *places)
        if f"die {self.calls}" == FAULT:
            os.kill(os.getpid(), signal.SIGKILL)

    def broadcast_weights_for_collective(self, *_: Any, **__: Any) -> list:
        return []

    def prepare_refit_info(self) -> dict:
        return {}

    def print_node_ip_and_gpu_id(self) -> None:
        pass

    def get_free_memory_bytes(self) -> int:
        return 1 << 30


class CpuTeacher(_Optional):
    """A teacher of MOPD, in the process that collects the rollouts."""

    sharding_annotations = Axes()
    use_sequence_packing, sequence_length_pad_multiple = False, 1
    worker_group = SimpleNamespace(workers=[])

    def __init__(self, teacher_cfg, cluster, policy_config, tokenizer) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(teacher_cfg.model_name, dtype=torch.float32)

    def get_logprobs(self, data, **_: Any) -> BatchedDataDict:
        return BatchedDataDict({"reference_logprobs": logprobs_of(self.model, data)})


class CpuGeneration(_Optional):
    """Rolls out nothing itself: Gym asks the endpoint of this folder, as it would ask vLLM's."""

    requires_kv_scale_sync = False

    def __init__(self, cluster, config, **_: Any) -> None:
        self.cfg = config
        self.dp_openai_server_base_urls = [os.environ["STAGECOACH_ENDPOINT"]]

    def update_weights_from_collective(self) -> list:
        return [ray.put(not FAULT.startswith("refit"))]

    def blocks_training(self) -> bool:
        return False

    def get_logger_metrics(self) -> dict:
        return {}

    def get_step_metrics(self) -> dict:
        return {}
