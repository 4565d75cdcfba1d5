"""The checks of a stage of this backend.

They look for settings and reward models that ruin a training or its scores, an unsuitable site, packages off their
pins, rows that no verifier can reward, and a batch that fails.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from scripts.backends.protocol import LATER_JOBS, chat_format_of_start
from scripts.backends.trl.grpo import REWARD_MODEL
from scripts.backends.trl.placing import check_shares, longest_sequence, model_at_hand, ranks_on
from scripts.backends.trl.trial import check_batch
from scripts.backends.trl.versions import difference_of, missing_reporter
from scripts.finding import Check, Effort, Finding, Moment, refusal_of
from scripts.model.generation_settings import settings_asked, tokens_of, words_of
from scripts.model.hugging_face import has_reward_head, tensors_of, text_config_of
from scripts.model.lengths import AnswersOf, TokenCounter
from scripts.model.shape import Shape
from scripts.model.trainable import numbers_beyond
from scripts.recipe.resolve import own_environments
from scripts.recipe.sampling import Sampling
from scripts.recipe.site import GYM_PYTHON
from scripts.recipe.strict import nearest
from scripts.rewards.gym_yaml import agents_of
from scripts.rewards.registry import SPECS, check_row, environment_factory, register, register_gym, scores
from scripts.rewards.row_facts import SAMPLED, FactsOf, SamplesOf, unrewarded_in
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.chat_format import TEMPLATE_DATE, ChatFormat, chat_template_of, prints_date
from scripts.rows.jsonl import environment_of, key_of, read_rows
from scripts.rows.measures import BlockMeasure, ReadBlock, Split, measured, recorded
from scripts.rows.parallel import default_workers
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage
from scripts.stage.tables import ROLLOUTS, read_table

SAMPLE, MANY = 200, 0.4
SHOWN = 10
TOGETHER = (
    "processes sample together by policy.dtensor_cfg.enabled and by vllm_cfg.tensor_parallel_size, but TRL plays the "
    "turns of environments with tools in each process alone; drop these settings, or train in one process"
)


def model_told(stage: Stage) -> tuple[Path | None, Shape | None]:
    """Return the model and the shape of `model_at_hand`; None and None for a made model before an export is there."""
    export = stage.parent_export
    is_there = export is not None and (export / "config.json").is_file()
    if not is_there and stage.recipe.model.folder is None:
        return None, None
    return model_at_hand(stage)


def check_settings(candidate: Candidate) -> Iterator[Finding]:
    """Find lengths beyond the model's context, tokens outside of the vocabulary, missing layers, and dates."""
    stage = candidate.stage
    config, evaluation = stage.config, stage.recipe.evaluation
    model, shape = model_told(stage)
    if model is None or shape is None:
        return
    context = f"the model's max_position_embeddings are {shape.context}"
    tokens = config.max_length if config.samples_by_vllm else longest_sequence(stage, model)[0]  # vLLM takes the limit
    if shape.context and tokens > shape.context:
        yield candidate.warns(f"a sequence has up to {tokens} tokens, but {context}")
    asked = evaluation.max_new_tokens if stage.node.is_scored else None
    if shape.context and asked and asked >= shape.context:
        yield candidate.warns(f"evaluation.max_new_tokens is {asked}, but {context}")
    samplers = {"evaluation": evaluation, "policy.generation": getattr(config.policy, "generation", None)}
    for key, sampling in samplers.items():
        beyond = [token for token in sampling.stop_token_ids if token >= shape.vocabulary] if sampling else []
        if beyond:
            has = f"the vocabulary has {shape.vocabulary} tokens"
            yield candidate.warns(f"{key}.stop_token_ids: no response ends at {beyond}; {has}")
    for says in date_printed(stage, model):
        yield candidate.warns(says)
    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in tensors_of(model) if "norm" not in name}
    for target in config.policy.lora.target_modules if config.policy.lora else ():
        if target.rpartition(".")[2] not in layers:
            lacks = f"no layer of the model is named {target}{nearest(target, layers)}"
            yield candidate.warns(f"policy.lora.target_modules: {lacks}")


def check_sampling(candidate: Candidate) -> Iterator[Finding]:
    """Find settings of sampling in the model's folder that are not used, and penalties that reach the end token."""
    stage = candidate.stage
    model, _ = model_told(stage)
    if model is None or not (model / "config.json").is_file():
        return
    samplers = _samplers(stage)
    asked = settings_asked(model) if samplers else {}
    if asked:
        yield candidate.warns(words_of(asked, " and ".join(f"{key}.*" for key in samplers)))
    tokens = tokens_of(model)
    ends, pad = tokens.get("eos_token_id"), tokens.get("pad_token_id")
    is_shared = pad is not None and pad in (ends if isinstance(ends, list) else [ends])
    for key, sampling in samplers.items():
        by_vllm = getattr(sampling, "backend", None) == "vllm"
        if is_shared and sampling.repetition_penalty != 1 and not by_vllm:
            says = "the model pads with its end token, so padded prompts would penalise the end of a response"
            yield candidate.warns(f"{key}.repetition_penalty: {says}; name another token as model.pad_token")


def _samplers(stage: Stage) -> dict[str, Sampling]:
    """Return the sections of the recipe by which a stage's model is sampled: for its scores, and its rollouts."""
    scores = stage.recipe.evaluation if stage.node.is_scored else None
    rollouts = getattr(stage.config.policy, "generation", None)
    named = {"evaluation": scores, "policy.generation": rollouts}
    return {key: sampling for key, sampling in named.items() if sampling is not None}


def date_printed(stage: Stage, model: Path) -> Iterator[str]:
    """Yield what day the chat template prints, where it prints the day's."""
    template = stage.config.chat_template or chat_template_of(model)
    variables = stage.config.policy.tokenizer.chat_template_kwargs
    if template is None or not prints_date(template, model, variables):
        return
    day = stage.recipe.model.template_date or TEMPLATE_DATE
    yield (
        f"the chat template prints the day's date; in training, scores and data it is {day} (model.template_date), and "
        "whoever serves the model elsewhere has another"
    )


def check_cut_answers(candidate: Candidate) -> Iterator[Finding]:
    """Find a limit of tokens that cuts many answers: of the rows, or of the parent's held-out responses."""
    stage = candidate.stage
    (model, shape), config = model_at_hand(stage), stage.config
    if model is None or shape is None:
        return
    generation, evaluation, lengths = getattr(config.policy, "generation", None), stage.recipe.evaluation, []
    key, sampling, whose = "evaluation", evaluation, "the first rows' answers"
    if generation:
        key, sampling, whose = "policy.generation", generation, "the parent's held-out answers"
        for rollouts in [parent.paths.rollouts for parent in stage.parents]:
            responses = read_table(rollouts, ROLLOUTS) if rollouts.is_file() else ROLLOUTS.empty_table()
            lengths = responses["tokens_after"].drop_null().to_pylist()
    elif evaluation and (model / "tokenizer.json").is_file():
        counter = TokenCounter(str(model / "tokenizer.json"), config.chat_template or chat_template_of(model))
        lengths = measured(stage.train_split, AnswersOf(config.kind, counter, SAMPLE)).tokens
    limit = sampling.max_new_tokens if sampling else None
    if not limit or not lengths:
        return
    share = sum(length >= limit for length in lengths) / len(lengths)
    if share >= MANY:
        yield candidate.warns(f"{key}.max_new_tokens is {limit}, which {share:.0%} of {whose} reach: they would be cut")


@dataclass
class Holding:
    """The rows that hold one of some texts: how many times, and line and text of the first."""

    rows: int = 0
    count: int = 0
    first: tuple[int, str] | None = None

    def add(self, later: "Holding") -> None:
        """Add the rows that follow."""
        if self.first is None and later.first is not None:
            line, token = later.first
            self.first = (self.rows + line, token)
        self.count += later.count
        self.rows += later.rows


@dataclass(frozen=True)
class HoldingOf(BlockMeasure[Holding]):
    """The rows of a split that hold one of these texts."""

    name: ClassVar = "holding"
    outcome: ClassVar = Holding
    code: ClassVar = (__file__,)

    texts: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The texts."""
        return {"texts": list(self.texts)}

    def of_block(self, block: ReadBlock) -> Holding:
        """Return which of a block's rows hold a text."""
        written = {text: msgspec.json.encode(text)[1:-1] for text in self.texts}
        found = Holding(rows=len(block.lines))
        for number, line in enumerate(block.lines, start=1):
            held = [text for text, encoded in written.items() if encoded in line]
            found.count += len(held)
            if held and found.first is None:
                found.first = (number, held[0])
        return found


def rowless_tokens(stage: Stage) -> tuple[dict[str, int], int]:
    """Return the tokens, with their numbers, that the embedding of a stage's start has no row for, and its rows."""
    folder = stage.parent_export
    if folder is None or not (folder / "tokenizer.json").is_file():
        return {}, 0
    rows = text_config_of(folder).get("vocab_size")
    return (numbers_beyond(folder / "tokenizer.json", rows), rows) if isinstance(rows, int) else ({}, 0)


def check_tokens(candidate: Candidate) -> Iterator[Finding]:
    """Find rows, of either split, with tokens beyond the embedding of the stage's start.

    Such tokens were added to a tokenizer alone; they do no harm where no row holds one.
    """
    stage = candidate.stage
    numbers, rows = rowless_tokens(stage)
    for split in (stage.train_split, stage.validation_split) if numbers else ():
        found = measured(split, HoldingOf(tuple(numbers)), default_workers())
        if found.first is not None:
            number, token = found.first
            yield candidate.stops(
                f"{split}:{number}: holds {token!r}, which the tokenizer takes for the token of number "
                f"{numbers[token]}, but the embedding has {rows} rows ({found.count} such in all); drop these rows or "
                "the text, or enlarge the model's embedding (transformers' resize_token_embeddings)"
            )


def unfit_readers(stage: Stage, policy: ChatFormat | None) -> Iterator[str]:
    """Yield a line for each teacher or reward model that cannot read what the policy writes.

    Both read the policy's own text, a teacher by the policy's own tokens, in rows of the policy's length.
    """
    tokens = stage.config.max_length
    for role, folder in stage.role_exports.items():
        if policy is None or not (folder / "config.json").is_file():
            continue
        faults, (own, theirs) = policy.changes(ChatFormat.of(folder)), map(text_config_of, (policy.folder, folder))
        if role == REWARD_MODEL and not has_reward_head(theirs):
            faults = [f"no head for rewards ({folder}/config.json, architectures); name a stage of algorithm reward"]
        elif role != REWARD_MODEL and own.get("vocab_size") != theirs.get("vocab_size"):
            faults.append(f"vocab_size ({own.get('vocab_size')}, now {theirs.get('vocab_size')})")
        if (context := theirs.get("max_position_embeddings") or tokens) < tokens:
            faults.append(f"max_position_embeddings ({context}, fewer than the {tokens} tokens of a row)")
        if faults:
            says = f"{role} cannot read what the policy writes: {'; '.join(faults)}"
            yield f"{says}; name another in stages.{stage.name}, made from the policy's own model"


def check_reporter(candidate: Candidate) -> Iterator[Finding]:
    """Find a missing package of the site's report_to; the finding is the same for all stages."""
    site = candidate.site
    lacking = missing_reporter(candidate.python, site.report_to) if site is not None else None
    if lacking is not None:
        yield Finding(lacking)


def check_sharing(candidate: Candidate) -> Iterator[Finding]:
    """Find a step that the site's processes cannot share evenly."""
    stage, site = candidate.stage, candidate.site
    if site is not None:
        yield from refusal_of(check_shares, stage.name, stage.config, stage.settings, *ranks_on(site, stage))


def check_gpus(candidate: Candidate) -> Iterator[Finding]:
    """Find idle GPUs of a cluster's nodes."""
    site = candidate.site
    if site is None or site.accelerator != "cpu" or site.slurm is None or not site.slurm.gpus_per_node:
        return
    says = f"site {site.name} gives it nodes of {site.slurm.gpus_per_node} GPUs, and says accelerator: cpu"
    yield candidate.warns(f"{says}, so these would stand idle; make it cuda", trap=35)


def check_pins(candidate: Candidate) -> Iterator[Finding]:
    """Find packages off their pins in the Python with vLLM."""
    config = candidate.stage.config
    unfit = difference_of(candidate.python, config.release) if config.samples_by_vllm else None
    if unfit:
        yield candidate.stops(unfit)


def check_readers(candidate: Candidate) -> Iterator[Finding]:
    """Find teachers and reward models that cannot read the policy's texts."""
    stage = candidate.stage
    for says in unfit_readers(stage, chat_format_of_start(stage)):
        yield candidate.stops(says)


def check_environments(candidate: Candidate) -> Iterator[Finding]:
    """Find the user's environments that fail on the first rows of every other blend at hand.

    Register all environments, for later stages and for the checks of rows below.
    """
    stage = candidate.stage
    register(own_environments(stage.recipe), stage.config.environments)
    for name, blend in stage.recipe.blends.items():
        split = stage.results / "data" / name / stage.train_split.name
        own = stage.recipe.environments.keys() & {*blend.rewarding}
        if name == stage.settings.blend or not own or not split.exists():
            continue
        samples = recorded(Split.of(split), SamplesOf(SAMPLED, frozenset(blend.allow)))
        first = samples.first if samples is not None else _first_rows(split, own)
        for environment, (line, row) in sorted(first.items(), key=lambda each: each[1][0]):
            if environment in own:
                yield from refusal_of(scores, [(row, "")], [f"{split}:{line}"], about=stage.name)


def check_turns(candidate: Candidate) -> Iterator[Finding]:
    """Find processes that sample together in environments with tools."""
    stage, site = candidate.stage, candidate.site
    blend = stage.recipe.blends[stage.settings.blend]
    has_tools = any(map(environment_factory, blend.rewarding))
    if site is None or not has_tools or ranks_on(site, stage)[1] == 1:
        return
    policy = stage.settings.policy
    if policy.dtensor_cfg.enabled or policy.generation.vllm_cfg.tensor_parallel_size > 1:
        yield candidate.stops(TOGETHER)


def check_rewards(candidate: Candidate) -> Iterator[Finding]:
    """Find rows of prompts that obey the contract, but that no verifier can reward."""
    stage = candidate.stage
    blend = stage.recipe.blends[stage.settings.blend]
    if blend.kind != "prompts":
        return
    python, allow = gym_python(candidate), frozenset(blend.allow)
    # rows that NeMo-Gym's servers reward, by the names of their agents
    served = {*agents_of(getattr(stage.settings, "gym", None), python)}
    for says in _unrewarded(stage.train_split, allow, served):
        yield candidate.stops(says)
    if {*stage.node.rows} & {*stage.recipe.graph.scored_rows}:
        served &= {*agents_of(stage.recipe.evaluation.gym, python)}
    for says in _unrewarded(stage.validation_split, allow, served):
        yield candidate.stops(says)


def start_servers(candidate: Candidate) -> Iterator[Finding]:
    """Start NeMo-Gym's servers, or reach them; ServiceError where one does not answer."""
    stage = candidate.stage
    settings = stage.settings
    gym = getattr(settings, "gym", None)
    if gym and stage.recipe.blends[settings.blend].kind == "prompts":
        for server in register_gym(gym, settings.gym_servers, gym_python(candidate)):
            server.wait()
    yield from ()


def gym_python(candidate: Candidate) -> str:
    """Return the Python of NeMo-Gym."""
    return candidate.site.gym_python if candidate.site is not None else GYM_PYTHON


def _first_rows(split: Path, environments: Collection[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return line and row of the first row of each of these environments, reading no further than to the last one."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, _, row in read_rows(split):
        if len(found) == len(environments):
            break
        environment = environment_of(row, split, number)
        if environment in environments:
            found.setdefault(environment, (number, row))
    return found


def _unrewarded(split: Path, allow: frozenset[str], served: Collection[str]) -> list[str]:
    """Return the rows that obey their contract, but that no verifier can reward.

    Gym's servers reward the rows of the agents `served`. A user's environment with a check of rows is asked each time,
    since it may read more than the row.
    """
    facts = measured(split, FactsOf("prompts", allow), default_workers())
    found, count = unrewarded_in(facts, served)
    own = {name for name in facts.environments if SPECS.get(name, EnvironmentSpec()).has_own_check}
    if asked := own.difference(served):
        refused = [*_refused_by(split, allow, asked)]
        found, count = sorted([*found, *refused]), count + len(refused)
    lines = [f"{split}:{line}: {problem}" for line, problem in found[:SHOWN]]
    more = count - len(lines)
    return lines + ([f"{split}: and {more} rows more"] if more > 0 else [])


def _refused_by(split: Path, allow: frozenset[str], environments: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and problem of the rows that the checks of a user's environments refuse."""
    for number, line, row in read_rows(split):
        if environment_of(row, split, number) not in environments or (allow and key_of(line) in allow):
            continue
        problem = check_row(row)
        if problem is not None:
            yield number, problem


EXPORTED = "the start's export may be there since, with its own config and chat template"
CHECKS: list[Check[Candidate]] = [
    Check(Moment.READ, check_reporter, again="a preflight's Python may be another"),
    Check(Moment.PLAN, check_settings, again=EXPORTED),
    Check(Moment.PLAN, check_sampling, again=EXPORTED),
    Check(Moment.START, check_sharing, again=LATER_JOBS),
    Check(Moment.START, check_gpus),
    Check(Moment.PREFLIGHT, check_cut_answers),
    Check(Moment.PREFLIGHT, check_pins),
    Check(Moment.PREFLIGHT, check_tokens),
    Check(Moment.PREFLIGHT, check_readers),
    Check(Moment.PREFLIGHT, check_environments),
    Check(Moment.PREFLIGHT, check_turns),
    Check(Moment.PREFLIGHT, check_rewards),
    Check(Moment.PREFLIGHT, start_servers, Effort.SERVERS),
    Check(Moment.PREFLIGHT, check_batch, Effort.BATCH),
]
"""In the order of asking, within an effort."""
