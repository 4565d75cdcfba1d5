"""Settings and reward models that ruin a training or its scores, told before the stage trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from scripts.backends.trl.grpo import REWARD_MODEL
from scripts.backends.trl.placing import longest_sequence, model_at_hand
from scripts.model.generation_settings import settings_asked, tokens_of, words_of
from scripts.model.hugging_face import has_reward_head, tensors_of, text_config_of
from scripts.model.lengths import AnswersOf, TokenCounter
from scripts.model.trainable import numbers_beyond
from scripts.recipe.sampling import Sampling
from scripts.recipe.strict import nearest
from scripts.rows.chat_format import TEMPLATE_DATE, ChatFormat, chat_template_of, prints_date
from scripts.rows.measures import BlockMeasure, ReadBlock, measured
from scripts.rows.parallel import default_workers
from scripts.stage.stage import Stage
from scripts.stage.tables import ROLLOUTS, read_table

SAMPLE, MANY = 200, 0.4


def unlikely_settings(stage: Stage) -> Iterator[str]:
    """Yield lengths beyond the model's context, tokens outside of its vocabulary, layers that it lacks, and dates."""
    config, evaluation = stage.config, stage.recipe.evaluation
    model, shape = model_at_hand(stage)
    if model is None or shape is None:
        return
    tokens = config.max_length if config.samples_by_vllm else longest_sequence(stage, model)[0]  # vLLM takes the limit
    if shape.context and tokens > shape.context:
        yield f"a sequence has up to {tokens} tokens, but the model's max_position_embeddings are {shape.context}"
    asked = evaluation.max_new_tokens if stage.node.is_scored else None
    if shape.context and asked and asked >= shape.context:
        yield f"evaluation.max_new_tokens is {asked}, but the model's max_position_embeddings are {shape.context}"
    samplers = {"evaluation": evaluation, "policy.generation": getattr(config.policy, "generation", None)}
    for key, sampling in samplers.items():
        if sampling and (beyond := [token for token in sampling.stop_token_ids if token >= shape.vocabulary]):
            yield f"{key}.stop_token_ids: no response ends at {beyond}; the vocabulary has {shape.vocabulary} tokens"
    yield from date_printed(stage, model)
    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in tensors_of(model) if "norm" not in name}
    for target in config.policy.lora.target_modules if config.policy.lora else ():
        if target.rpartition(".")[2] not in layers:
            yield f"policy.lora.target_modules: no layer of the model is named {target}{nearest(target, layers)}"


def unlikely_sampling(stage: Stage) -> Iterator[str]:
    """Yield what the model's folder asks of sampling in vain, and penalties on repetition that reach the end token."""
    model, _ = model_at_hand(stage)
    if model is None or not (model / "config.json").is_file():
        return
    samplers = _samplers(stage)
    if samplers and (asked := settings_asked(model)):
        yield words_of(asked, " and ".join(f"{key}.*" for key in samplers))
    tokens = tokens_of(model)
    ends, pad = tokens.get("eos_token_id"), tokens.get("pad_token_id")
    is_shared = pad is not None and pad in (ends if isinstance(ends, list) else [ends])
    for key, sampling in samplers.items():
        by_vllm = getattr(sampling, "backend", None) == "vllm"
        if is_shared and sampling.repetition_penalty != 1 and not by_vllm:
            says = "the model pads with its end token, so padded prompts would penalise the end of a response"
            yield f"{key}.repetition_penalty: {says}; name another token as model.pad_token"


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


def cut_answers(stage: Stage) -> Iterator[str]:
    """Yield a limit of tokens that cuts many answers: of the rows, or of the parent's held-out responses."""
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
    if limit and lengths and (share := sum(length >= limit for length in lengths) / len(lengths)) >= MANY:
        yield f"{key}.max_new_tokens is {limit}, which {share:.0%} of {whose} reach: they would be cut"


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


def tokens_without_rows(stage: Stage) -> Iterator[str]:
    """Yield a line for each split whose rows hold tokens that the embedding of the stage's start has no row for.

    Such tokens were added to a tokenizer alone; they do no harm where no row holds one.
    """
    numbers, rows = rowless_tokens(stage)
    for split in (stage.train_split, stage.validation_split) if numbers else ():
        found = measured(split, HoldingOf(tuple(numbers)), default_workers())
        if found.first is not None:
            number, token = found.first
            yield (
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
