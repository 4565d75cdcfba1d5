"""Settings of a NeMo-RL stage with effect on weights, and the resolved config made of them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from scripts.recipe.sampling import OWN
from scripts.recipe.site import Variable
from scripts.recipe.stage_settings import PLACE_IN_ROWS, ROWS_LEFT_OUT, Training, TrainingConfig
from scripts.recipe.strict import Strict, invalid, matching

PREFETCHED_STEPS = 2
ROLLOUTS = ("grpo", "distillation")
"""Loops that sample responses to a row."""
ROUTING = ("of", "default")
"""Keys of ``distillation`` that NeMo-RL does not have."""
DRIVERS = {
    "sft": ("run_sft.py", "run_vlm_sft.py"),
    "distillation": ("run_grpo_nemo_gym.py", "run_distillation.py", "run_distillation_nemo_gym.py"),
    "reward": ("run_rm.py",),
}
FITTING = {
    None: ("sft", "distillation"),
    "pairs": ("dpo", "mpo", "reward"),
    "verifier": ("grpo", "distillation"),
    "judge": ("grpo", "distillation"),
}
"""Algorithms by the origin of the reward."""
READS = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}
"""Defaults of ``data`` in NeMo-RL's sft.yaml: how SFT tokenizes a conversation."""
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""NeMo-RL's template for ``chat_template: null``."""
JudgeName = matching(r"^[a-z][a-z0-9_]*$")
Line = matching(r"^[^\r\n]+$")
OURS = ("--tensor-parallel-size", "-tp", "--distributed-executor-backend", "--port", "--served-model-name")
SECRET = ("--api-key",)


def _is_plain(address: str) -> str:
    """Refuse an address with a user, a password or a query, without showing the address."""
    if any(sign in address for sign in "@?#"):
        raise invalid("is to be http://host:port/v1 without user, password, query or fragment: no secret stands here")
    return address.rstrip("/")


def _is_free(argument: str) -> str:
    option = argument.split("=", 1)[0]
    if option in OURS:
        raise invalid(f"leave {option} out, which follows from the judge's other keys")
    if option in SECRET:
        raise invalid(f"leave {option} out: NeMo-Gym would not send the key, and no secret stands here")
    return argument


class JudgeModel(Strict):
    """A judge by what changes rewards."""

    server: matching(r"^\w+(\.\w+)*$") = Field(
        description="The key below env.nemo_gym with base_url and model: genrm_model.responses_api_models.genrm_model."
    )
    model: matching(r"^[\w/.:@+-]+$") = Field(
        description="A folder or a repository of the hub; with address, the name by which the model is served."
    )
    arguments: list[Annotated[Line, AfterValidator(_is_free)]] = Field([], description="Of vllm serve, a word each.")


class Judge(JudgeModel):
    """A judge: a pool of `replicas`, or a server at an `address`. No GPU has tried either."""

    replicas: PositiveInt | None = None
    """Servers of the pool, behind one address."""
    nodes_per_replica: PositiveInt = 1
    """Nodes of a replica, over all of whose GPUs the model is split (tensor parallelism)."""
    environment: dict[Variable, matching(r"^[^\r\n]*$")] = Field({}, description="Variables of the pool. No secrets.")
    address: Annotated[matching(r"^https?://\S+$"), AfterValidator(_is_plain)] | None = None
    """Of a server elsewhere, as http://host:8000/v1; nothing is started."""

    @model_validator(mode="after")
    def _is_served_one_way(self) -> "Judge":
        if (self.replicas is None) == (self.address is None):
            raise invalid("say replicas, to start a pool, or address, for a server elsewhere: one of both")
        if self.address and (idle := self.model_fields_set & {"nodes_per_replica", "environment", "arguments"}):
            raise invalid(f"{', '.join(sorted(idle))}: for a pool, and address names a server elsewhere; leave it out")
        return self


class NemoRlTraining(Training):
    """A config of NeMo-RL's and the recipe's settings over the config, in NeMo-RL's keys.

    ``sft``, ``grpo``, ``dpo``, ``mpo``, ``rm``, ``loss_fn``, ``policy``, ``teacher``, ``data``, ``env`` and ``logger``
    reach the driver unchanged, and ``distillation`` without `ROUTING`.
    """

    amending: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("loss_fn", "env", "environment", "judges", "grpo", "distillation", "dpo", "mpo"), ""),
        "max_num_steps": "",
        **dict.fromkeys(("grpo.num_prompts_per_step", "distillation.num_prompts_per_step"), PLACE_IN_ROWS),
        **dict.fromkeys(("grpo.num_generations_per_prompt", "distillation.num_generations_per_prompt"), PLACE_IN_ROWS),
        "grpo.async_grpo": PLACE_IN_ROWS,
        "grpo.seed": "the order of the rows and all random numbers follow from it",
        "policy": "NeMo-RL takes model, optimizer and schedule with their settings from the checkpoint",
        "policy.train_global_batch_size": PLACE_IN_ROWS,
        "policy.max_total_sequence_length": ROWS_LEFT_OUT,
        "data": "the rows would be other ones, or come in another order",
        "overrides": "an override may change anything; name the setting in its own section",
    }

    backend: Literal["nemo_rl"]
    algorithm: Literal["sft", "grpo", "dpo", "mpo", "distillation", "reward"]
    reward: Literal["verifier", "judge", "pairs"] | None = None
    """Where the reward comes from; none, and only there: SFT, and distillation, which may have rewards to look at."""
    config: str = Field(description="The config's path in NeMo-RL's checkout.")
    entry: str = Field("examples/nemo_gym/run_grpo_nemo_gym.py", description="The driver's path in the checkout.")
    max_num_steps: PositiveInt | None = None
    """The planned step; none: as many as the training rows are enough for."""
    sft: dict[str, Any] = Field({})
    grpo: dict[str, Any] = Field({})
    dpo: dict[str, Any] = Field({})
    mpo: dict[str, Any] = Field({})
    rm: dict[str, Any] = Field({})
    distillation: dict[str, Any] = Field(
        {}, description="The teacher's role by environment (of), that of all others (default), and NeMo-RL's keys."
    )
    on_policy_distillation: dict[str, Any] = Field({})
    teacher: dict[str, Any] = Field({}, description="Settings of the teacher, as policy's, for run_distillation.py.")
    loss_fn: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    data: dict[str, Any] = Field({})
    env: dict[str, Any] = Field({})
    add: dict[str, Any] = Field({}, description="Settings like those above that the release's config does not have.")
    judges: dict[JudgeName, JudgeModel] = Field({})
    sandbox: bool = Field(False, description="A sandbox container beside every node's, for code and Lean.")
    sif: bool = Field(False, description="The rows run in containers of their own (site's nemo_rl.sif).")
    environment: dict[str, str] = Field({}, description="Variables of the driver. No secrets.")
    overrides: list[str] = Field([], description="Further Hydra overrides; they come last and win.")

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Return the recipe's ``policy.tokenizer``."""
        added = self.add.get("policy", {}).get("tokenizer", {})
        return {**(self.policy.get("tokenizer") or {}), **(added or {})}

    @property
    def chat_template(self) -> str | None:
        """Return the recipe's chat template: a path (.jinja) or the text; None for the tokenizer's."""
        named = self.tokenizer.get("chat_template", OWN)
        if named is None:
            return PASSTHROUGH
        return None if named.lower() == OWN else named

    @property
    def reads(self) -> dict[str, bool]:
        """Return SFT's options of beginnings and ends: the recipe's ``data`` over `READS`."""
        return {name: self.data.get(name, value) for name, value in READS.items()}

    @property
    def loop(self) -> str:
        """Return NeMo-RL's name of the training loop, that of the loop's section."""
        if self.algorithm == "distillation" and "grpo" in self.entry:
            return "grpo"
        return "rm" if self.algorithm == "reward" else self.algorithm

    @property
    def section(self) -> Any:
        """Return the settings of the training loop."""
        return getattr(self, self.loop)

    @property
    def routes(self) -> bool:
        """Return whether each row is taught by the teacher of its environment (MOPD), or all by one."""
        return self.algorithm == "distillation" and self.loop == "grpo"

    @property
    def rows_per_step(self) -> int:
        """Return the training rows of one step."""
        if self.loop in ROLLOUTS:
            return self.section["num_prompts_per_step"]
        return self.policy["train_global_batch_size"]

    @property
    def max_length(self) -> int:
        """Return the most tokens of prompt and response together."""
        return self.policy["max_total_sequence_length"]

    @property
    def longest_row(self) -> int:
        """Return the most tokens of a row; SFT masks a row of full length."""
        return self.max_length - (self.algorithm == "sft")

    @property
    def samples_per_step(self) -> int:
        """Return the training rows of one step, or the completions sampled for the rows."""
        return self.rows_per_step * (self.section["num_generations_per_prompt"] if self.loop in ROLLOUTS else 1)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether rollouts are generated during training, in one pass over the data."""
        return bool(self.grpo.get("async_grpo", {}).get("enabled", False))

    def planned_step(self, train_rows: int | None) -> int | None:
        """Return the step at which the stage is done; None where the rows are unknown.

        By default ``max_num_epochs`` passes over the training rows, without partial batches. Asynchronous training
        generates ahead and waits for ever at the end of the data, so the planned step lies two steps before the end;
        a resumed training may end earlier (scripts.stage.progress).
        """
        if self.max_num_steps is not None or train_rows is None:
            return self.max_num_steps
        batches = train_rows // self.rows_per_step
        if self.is_asynchronous:
            return max(0, batches - PREFETCHED_STEPS)
        return batches * self.section.get("max_num_epochs", 1)

    @model_validator(mode="after")
    def _fits_its_algorithm(self) -> "NemoRlTraining":
        if self.reward is None and self.algorithm not in FITTING[None]:
            raise invalid(f"reward is missing, which says where that of {self.algorithm} comes from")
        if self.algorithm not in FITTING[self.reward]:
            raise invalid(
                f"{self.algorithm} does not fit a reward from {self.reward}: static preference pairs are for dpo, mpo "
                "or reward; a deterministic check (verifier) or a judge is for grpo or distillation; sft has none"
            )
        if (drivers := DRIVERS.get(self.algorithm)) and self.entry.rpartition("/")[2] not in drivers:
            raise invalid(f"entry must end in {' or '.join(drivers)} to train {self.algorithm}, not {self.entry}")
        needed = [("policy", "train_global_batch_size"), ("policy", "max_total_sequence_length")]
        if self.loop in ROLLOUTS:
            needed += [(self.loop, "num_prompts_per_step"), (self.loop, "num_generations_per_prompt")]
        for section, key in needed:
            if not isinstance(value := getattr(self, section).get(key), int) or value <= 0:
                raise invalid(f"{section}.{key} must be stated" + f", above 0, not {value}" * (value is not None))
        try:
            _, loss = (self.chat_template, self.is_asynchronous), self.loss_fn | self.add.get("loss_fn", {})
        except (AttributeError, TypeError):
            raise invalid("add, policy.tokenizer and grpo.async_grpo hold settings, chat_template a text") from None
        of, default = self.distillation.get("of", {}), self.distillation.get("default")
        if not isinstance(of, dict) or not all(isinstance(role, str) for role in (*of.values(), default or "")):
            raise invalid("distillation.of names a role for each environment, and distillation.default one role")
        if self.routes and not self.is_asynchronous:
            raise invalid("grpo.async_grpo.enabled must be true: NeMo-RL asks teachers during asynchronous training")
        if self.loop not in ROLLOUTS:
            return self
        product, batch = self.samples_per_step, self.policy["train_global_batch_size"]
        if loss.get("force_on_policy_ratio") and batch != product:
            raise invalid(
                f"loss_fn.force_on_policy_ratio wants policy.train_global_batch_size ({batch}) to be "
                f"{self.loop}.num_prompts_per_step x num_generations_per_prompt = {product}"
            )
        if product % batch:
            raise invalid(
                f"{self.loop}.num_prompts_per_step x num_generations_per_prompt = {product} is no multiple of "
                f"policy.train_global_batch_size, {batch}"
            )
        return self


class FirstModel(Strict):
    """The model of a stage without a parent."""

    name: str
    revision: str | None = None


class NemoRlConfig(TrainingConfig, NemoRlTraining):
    """The resolved config of a stage, with `model` where there is no parent.

    `mtp`, a setting of earlier recipes, stays in identities.
    """

    model: FirstModel | None = None
    mtp: bool = False
