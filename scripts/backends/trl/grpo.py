"""Settings of group relative policy optimisation."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from scripts.backends.trl.on_policy import PromptData, RolloutPolicy, RolloutSettings
from scripts.recipe.criteria import Criterion
from scripts.recipe.effect import Later, WithoutEffect
from scripts.recipe.expand import Start
from scripts.recipe.gym_release import JUDGES_GONE, Gym, GymServer, ServerName, check_gym
from scripts.recipe.stage_settings import Probe, Surroundings
from scripts.recipe.strict import Strict, invalid

ENVIRONMENT_PREFIX, METRIC_PREFIX, DIVERGENCE_PREFIX = "environment/", "metric/", "divergence/"
BY_NAME = {"environment_rewards": ENVIRONMENT_PREFIX, "own_metrics": METRIC_PREFIX, "divergences": DIVERGENCE_PREFIX}
UNJUDGED = "rewards/unjudged"
UNFINISHED = "rewards/unfinished_thoughts"
ROLLOUT_SECONDS, REWARD_SECONDS = "timing/rollouts", "timing/rewards"
REWARD_MODEL = "reward_model"
OF_TWO_REWARDS = ("reward_weights", "multi_objective_aggregation")
"""Settings of `Grpo` for a stage whose rollouts a reward model rewards too."""
MISMATCH = ("token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio")


class GrpoPolicy(RolloutPolicy):
    """The policy of a reinforcement stage."""

    train_global_batch_size: PositiveInt | None = Field(
        None,
        description="Completions an update; none: all of the step. Fewer make several updates a step, off policy from "
        "the second on.",
    )


class RewardWeights(Strict):
    """Weights of the rewards of a stage with a reward model; a reward without weight is not asked for."""

    environment: NonNegativeFloat = 1.0
    reward_model: PositiveFloat = 1.0


class Grpo(Strict):
    """Group relative policy optimisation (arXiv:2402.03300), token-level loss (DAPO, arXiv:2503.14476)."""

    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: int = Field(ge=2)
    max_num_steps: PositiveInt
    overlong_filtering: bool = Field(False, description="Take no gradient from responses cut at max_new_tokens.")
    normalize_rewards: bool = Field(True, description="Divide a group's advantages by the group's standard deviation.")
    use_leave_one_out_baseline: bool = False
    """Measure a response by the rest of the group (arXiv:2402.14740)."""
    reward_weights: Later[RewardWeights] = RewardWeights()
    multi_objective_aggregation: Later[Literal["sum_then_normalize", "normalize_then_sum"]] = "sum_then_normalize"
    """Of two rewards; normalize_then_sum: compare each within its group first (GDPO, arXiv:2601.05242)."""

    @model_validator(mode="after")
    def _compares_alike(self) -> "Grpo":
        otherwise = self.use_leave_one_out_baseline or not self.normalize_rewards
        if otherwise and self.multi_objective_aggregation == "normalize_then_sum":
            raise invalid(
                "normalize_then_sum divides each reward by its group's deviation from the group's mean; leave out "
                "use_leave_one_out_baseline and normalize_rewards"
            )
        return self


class GrpoLoss(Strict):
    """The clipped policy-gradient loss and the KL penalty."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.0
    """Weight of the k3 KL estimate to the parent."""
    ratio_clip_min: PositiveFloat = 0.2
    ratio_clip_max: PositiveFloat = 0.28
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio where the advantage is negative (dual clip, arXiv:1912.09729)."""
    token_level_loss: bool = True
    """Mean over all tokens of an update (arXiv:2503.14476); false: mean over responses."""
    sequence_level_importance_ratios: bool = False
    """One ratio a response, the geometric mean over tokens (GSPO, arXiv:2507.18071)."""
    use_importance_sampling_correction: bool = False
    """Weight the loss by the trainer's over vLLM's probability of the sampled tokens."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Bound of the weight (TIS, openreview xsonlP8DRV); none: unbounded."""

    @model_validator(mode="after")
    def _fits_together(self) -> "GrpoLoss":
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise invalid("sequence_level_importance_ratios is for token_level_loss: false; a token has no ratio then")
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1 + self.ratio_clip_max:
            raise invalid("ratio_clip_c must be greater than 1 + ratio_clip_max")
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise invalid("truncated_importance_sampling_ratio is for use_importance_sampling_correction: true")
        return self


class GrpoSettings(RolloutSettings):
    """A stage of reinforcement learning."""

    gone = JUDGES_GONE

    READS = ("template_date", "thoughts")
    ROLES = (REWARD_MODEL,)

    metrics = RolloutSettings.metrics | {
        "reward": "reward_mean",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "zero_variance_share",
        "kl": "kl",
        "tools/call_frequency": "tool_call_frequency",
        "tools/failure_frequency": "tool_failure_frequency",
        UNJUDGED: "unjudged_share",
        UNFINISHED: "unfinished_thoughts_share",
        f"rewards/{REWARD_MODEL}/mean": "reward_model_score",
        **{name: name for name in MISMATCH},
    }

    algorithm: Literal["grpo"]
    grpo: Grpo
    loss_fn: GrpoLoss = GrpoLoss()
    policy: GrpoPolicy
    data: Later[PromptData] = PromptData()
    gym: Later[Gym | None] = Field(None, description="None: the verifiers here reward the rows.")
    reward_model: WithoutEffect[Start | None] = Field(
        None, description="A stage of algorithm reward that rewards the rollouts."
    )
    gym_servers: WithoutEffect[dict[ServerName, GymServer]] = Field(
        {}, description="How Gym's servers are reached, by name."
    )
    probe: WithoutEffect[Probe] = Probe()

    @property
    def samples_per_step(self) -> int:
        """Completions in a step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a KL penalty."""
        return self.loss_fn.reference_policy_kl_penalty > 0

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step, each on a batch of the step's rollouts."""
        return self.samples_per_step // self.rows_per_update

    @property
    def rows_per_update(self) -> int:
        """Completions in an update."""
        return self.policy.train_global_batch_size or self.samples_per_step

    @property
    def shared_by_processes(self) -> dict[str, int | None]:
        """The batch of an update, and the prompts of a step, rewarded in whole groups."""
        return {"policy.train_global_batch_size": self.policy.train_global_batch_size} | super().shared_by_processes

    @property
    def running_gate(self) -> list[Criterion]:
        """Return the criteria; no default bound on the KL to vLLM's probabilities where those are renormalized."""
        sampling = self.policy.generation
        takes_all = sampling.top_p == 1 and sampling.top_k is None and sampling.min_p is None
        if takes_all and sampling.repetition_penalty == 1:
            return super().running_gate
        return [bound for bound in super().running_gate if bound in self.gate or bound.metric != "peak_gen_kl_error"]

    def values_with_effect(self) -> dict[str, Any]:
        """Return the settings that may change weights; the correction of vLLM's only for rollouts by vLLM."""
        values = super().values_with_effect()
        for name in self.sampler.passes_over:
            del values["loss_fn"][name]
        return values

    def make_small(self, values: dict[str, Any], prompts: int, starts: int) -> None:
        """Take few prompts a step with two responses each, in an update of all or of half, without Gym's servers."""
        super().make_small(values, prompts, starts)
        section, policy = values["grpo"], values["policy"]
        section["num_generations_per_prompt"] = 2
        policy.pop("train_global_batch_size", None)
        if self.updates_per_step > 1:
            policy["train_global_batch_size"] = section["num_prompts_per_step"]
        values.pop("gym", None)

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where the recipe and the stage do not fit, or its reward model is none."""
        super().check_in(around)
        scores = around.roles.get(REWARD_MODEL)
        if scores is not None and scores.answers_prompts:
            says = f"{self.reward_model} answers prompts; name a stage of algorithm reward"
            raise invalid(says, f"{around.at}.{REWARD_MODEL}")

    def _refuse_misfits(self) -> None:
        stated = self.policy.train_global_batch_size
        if stated is not None and self.samples_per_step % stated:
            raise invalid(
                f"policy.train_global_batch_size is {stated}, but num_prompts_per_step x num_generations_per_prompt = "
                f"{self.samples_per_step} is no multiple of it; leave it out for one update a step"
            )
        check_gym(self.gym, self.gym_servers)
        if self.reward_model is None and self.grpo.model_dump(include={*OF_TWO_REWARDS}, exclude_defaults=True):
            raise invalid(f"grpo.{' and grpo.'.join(OF_TWO_REWARDS)} are for a stage with a reward_model")
        self.sampler.refuse_loss(self.loss_fn)
