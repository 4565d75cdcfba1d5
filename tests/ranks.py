"""One of two ranks on this machine, without Ray: ``python -m tests.ranks PLAN.json RANK PORT``.

The plan is a list of [job.pickle, step at which to stop or null]; the jobs are trained one after the other, those with
shares last. Which rows a rank rewards goes to ``rewarded.RANK.jsonl`` in the run directory, in their order; how many of
the weights a rank holds, and how many there are, to ``held.RANK.json``.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from scripts.backends.protocol import StopRequest, read_job
from scripts.backends.trl import measuring
from scripts.backends.trl import setup as trl_setup
from scripts.backends.trl import train as trl_backend
from scripts.rewards.registry import reward_groups


class StopAt(StopRequest):
    """Due at a step."""

    def __init__(self, first: int, step: int | None):
        super().__init__()
        self.done, self.step = first, step

    def is_due(self, step_seconds, save_seconds):
        self.done += 1
        return self.done == self.step


def recording(path: Path):
    """A stand-in for `reward_groups` that notes the rows."""

    def reward(groups, *arguments, **options):
        with path.open("a") as file:
            file.writelines(json.dumps([row, len(responses)]) + "\n" for row, responses in groups)
        return reward_groups(groups, *arguments, **options)

    return reward


def noting_shares(path: Path, save):
    """A stand-in for `save_whole` that notes what the rank holds."""

    def save_and_note(trainer, folder):
        weights = list(trainer.model.parameters())
        held = sum(weight.to_local().numel() for weight in weights)
        path.write_text(json.dumps([held, sum(weight.numel() for weight in weights)]))
        save(trainer, folder)

    return save_and_note


def main() -> None:
    plan, rank, port = sys.argv[1:]
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo")
    save = trl_setup.save_whole
    for path, step in json.loads(Path(plan).read_text()):
        job = read_job(Path(path))
        measuring.reward_groups = recording(job.run / f"rewarded.{rank}.jsonl")
        trl_setup.save_whole = noting_shares(job.run / f"held.{rank}.json", save)
        trl_backend.train_rank(replace(job, stop=StopAt(job.start, step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
