"""Try a stage's reward on a few rollouts of the policy that it starts from.

Rollouts that all earn the same stop the stage, since nothing can be learnt from them; many groups without a
difference, or many rollouts cut short, are warned of. The record says by environment how rewards are spread and how
long rollouts are.
"""

import argparse
import time
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import logging as transformers_logging

from scripts.backends.trl.settings import GrpoSettings
from scripts.backends.trl.training import GrpoConfig
from scripts.errors import UserError, run_program
from scripts.evaluate.generate import Rollout, load_export, rollouts
from scripts.files import write_json
from scripts.model.processor import use_template
from scripts.model.random_init import fresh_model
from scripts.recipe.load import check_stage_name, load_recipe
from scripts.recipe.probe import Probe
from scripts.recipe.resolve import own_environments, read_config
from scripts.recipe.sampling import Sampling
from scripts.recipe.site import GYM_PYTHON
from scripts.rewards.judge import JudgeClients
from scripts.rewards.registry import register, register_gym, reward_groups
from scripts.rewards.trial import ProbeFindings, SampledRow, spread
from scripts.stage.probe import judges_of, rewardable, sample_rows


def try_rollouts(
    model: Any,
    processor: Any,
    samples: dict[str, list[SampledRow]],
    config: GrpoConfig,
    probe: Probe,
    judges: JudgeClients | None,
) -> ProbeFindings:
    """Sample rollouts for some rows of each environment as the stage of this resolved config would, and reward them.

    Equal arguments give equal rollouts. The model samples them itself, also where vLLM does in the stage.
    """
    sampling = config.policy.generation.model_dump(include={*Sampling.model_fields})
    sampling["chat_template_kwargs"] = config.policy.tokenizer.chat_template_kwargs
    rows = _share_out(rewardable(samples, judges), probe.prompts)
    if not rows:
        raise UserError("none of the rows can be rewarded without a judge; let probe.ask_judges be true")
    started = time.monotonic()
    repeated = [row for _, row in rows for _ in range(probe.generations)]
    sampled = rollouts(model, processor, repeated, **sampling, seed=config.seed)
    ended = time.monotonic()
    groups = [sampled[start : start + probe.generations] for start in range(0, len(sampled), probe.generations)]
    asked = [(row, [rollout.text for rollout in group]) for (_, row), group in zip(rows, groups, strict=True)]
    rewards = reward_groups(asked, judges)
    checking = time.monotonic() - ended
    found = ProbeFindings()
    found.times = [
        f"{len(sampled)} rollouts in {ended - started:.2f} s, {1000 * checking / len(sampled):.2f} ms a check"
    ]
    for name in dict.fromkeys(name for name, _ in rows):
        found.record[name] = _described(
            [group for (environment, _), *group in zip(rows, groups, rewards, strict=True) if environment == name]
        )
    whole = _described(list(zip(groups, rewards, strict=True)))
    _judge(found, whole, rewards, probe)
    found.record = {"rollouts": whole, "environments": found.record}
    return found


def _share_out(samples: dict[str, list[SampledRow]], count: int) -> list[tuple[str, dict[str, Any]]]:
    """`count` rows with their environments' names, as many of each environment as the others allow."""
    turns = [(turn, name, sampled.row) for name, rows in samples.items() for turn, sampled in enumerate(rows)]
    chosen = sorted(turns, key=itemgetter(0, 1))[:count]
    return [(name, row) for _, name, row in sorted(chosen, key=itemgetter(1, 0))]


def _described(groups: list[tuple[list[Rollout], list[float]]]) -> dict[str, Any]:
    rolled_out = [rollout for group, _ in groups for rollout in group]
    return {
        "prompts": len(groups),
        **spread([rewards for _, rewards in groups]),
        "length_mean": round(fmean(rollout.tokens for rollout in rolled_out), 6),
        "length_max": max(rollout.tokens for rollout in rolled_out),
        "truncation_rate": round(fmean(rollout.is_cut for rollout in rolled_out), 6),
    }


def _judge(found: ProbeFindings, whole: dict[str, Any], rewards: list[list[float]], probe: Probe) -> None:
    if len({reward for group in rewards for reward in group}) == 1:
        found.problems.append(
            f"all {whole['responses']} rollouts earn {rewards[0][0]:g}, so nothing can be learnt from them; start from "
            "a policy that sometimes succeeds, choose easier rows, mend the verifier, or let probe.prompts and "
            "probe.generations look at more"
        )
    elif whole["zero_variance_share"] > probe.zero_variance_share:
        found.warnings.append(
            f"in {whole['zero_variance_share']:.0%} of the groups all rollouts earn the same "
            f"(probe.zero_variance_share: {probe.zero_variance_share:.0%}); a step learns from the others alone"
        )
    if whole["truncation_rate"] > probe.truncation_rate:
        found.warnings.append(
            f"{whole['truncation_rate']:.0%} of the rollouts are cut at max_new_tokens (probe.truncation_rate: "
            f"{probe.truncation_rate:.0%}); raise policy.generation.max_new_tokens"
        )


def main() -> None:
    """Command line of the rollouts."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.trl.probe", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="a stage of GRPO that backend trl trains")
    parser.add_argument("--config", type=Path, required=True, help="the stage's config.yaml")
    parser.add_argument("--split", type=Path, required=True, help="train-split.jsonl of its blend")
    parser.add_argument(
        "--parent-export", type=Path, nargs="?", help="the parent's hf/record.json; none: a fresh model"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), default="cpu", help="what the model runs on")
    parser.add_argument("--gym-python", default=GYM_PYTHON, help="the Python of the environment with NeMo-Gym")
    parser.add_argument("--output", type=Path, required=True, help="probe.json")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    check_stage_name(recipe, arguments.stage, f"{arguments.recipe}: ")
    stage, config = recipe.stages[arguments.stage], read_config(arguments.config)
    if not isinstance(stage, GrpoSettings):
        raise UserError(f"{arguments.stage}: no stage of GRPO that backend trl trains, so it has no rollouts to try")
    register(own_environments(recipe, arguments.stage), config.environments)
    if stage.gym:
        register_gym(stage.gym, stage.gym_servers, arguments.gym_python)
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    if arguments.parent_export:
        model, processor = load_export(arguments.parent_export, arguments.accelerator)
        start = model, use_template(processor, config.chat_template)
    else:
        start = fresh_model(config)
    samples = sample_rows(arguments.split, stage.probe.prompts, frozenset(recipe.blends[stage.blend].allow))
    found = try_rollouts(*start, samples, config, stage.probe, judges_of(stage))
    found.report(arguments.stage, stage.probe.action)
    write_json(arguments.output, {"stage": arguments.stage, **found.record})


if __name__ == "__main__":
    run_program(main)
