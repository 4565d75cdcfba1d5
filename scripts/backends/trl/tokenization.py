"""Rows become tokens, learnt or not, without torch and TRL.

Texts are rendered in the chat template and tokenized without the tokenizer's special tokens, so a first token of both
is there once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from jinja2 import TemplateError
from PIL import Image

from scripts.backends.tokens import runs
from scripts.backends.trl.algorithm import TrlSettings
from scripts.errors import UserError
from scripts.recipe.sampling import TemplateVariables
from scripts.rewards.registry import tool_schemas
from scripts.rows.chat_format import marks_answers, read_template, tokenizer_of, training_template_of
from scripts.rows.jsonl import read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.learning_marks import learnt_places
from scripts.rows.messages import common_length, text_of, tools_of
from scripts.rows.prompts import Messages, as_chat, open_picture, pictures_of, prompt_of, render
from scripts.rows.thoughts import begun_by

TOKENS = pa.list_(pa.int32())
DEMONSTRATIONS = pa.schema({"input_ids": TOKENS, "labels": TOKENS, "pictures": pa.list_(pa.string())})
ANSWERS = {
    "preferences": pa.schema(dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), TOKENS)),
    "unpaired": pa.schema({"prompt_ids": TOKENS, "completion_ids": TOKENS, "label": pa.bool_()}),
}
"""The columns of tokenized answers by kind of row: prompt, answers, and the row's own fields."""
PROMPTS = pa.schema({"prompt": pa.string(), "row": pa.string(), "line": pa.int64(), "has_pictures": pa.bool_()})
IGNORED = -100
"""The label of a token that is not learnt."""
SHOWN = 40
Spans = list[tuple[int, int]]


class Line(NamedTuple):
    """A row of a split with line number and text; messages name it by `place`."""

    number: int
    place: str
    text: str
    row: dict[str, Any]


def lines_of(split: Path) -> Iterator[Line]:
    """Yield the lines of a split, in order."""
    for number, line, row in read_rows(split):
        yield Line(number, f"{split}:{number}", line.decode(), row)


def preparation_of(config: TrlSettings, processor: Any) -> tuple[pa.Schema, partial]:
    """Return the columns of a stage's rows, and a function from lines of a split to rows, by keyword arguments alone.

    UserError for a distillation in environments with tools of their own.
    """
    return PREPARATIONS[config.kind](config, processor)


def _of_demonstrations(config: TrlSettings, processor: Any) -> tuple[pa.Schema, partial]:
    """Return columns and function for conversations."""
    told = {
        "processor": processor,
        "variables": config.policy.tokenizer.chat_template_kwargs,
        "max_length": config.max_length,
        "assistant_only_loss": config.sft.assistant_only_loss,
    }
    return DEMONSTRATIONS, partial(tokenize_demonstrations, **told)


def _of_prompts(config: TrlSettings, processor: Any) -> tuple[pa.Schema, partial]:
    """Return columns and function for prompts; UserError for tools that the algorithm cannot play."""
    tools = tool_schemas(config.environments)
    if tools and not config.plays_tools:
        names = ", ".join(tools)
        raise UserError(
            f"{config.algorithm} plays no turns with an environment's tools; leave {names} out of the blend"
        )
    told = {
        "processor": processor,
        "variables": config.policy.tokenizer.chat_template_kwargs,
        "max_length": config.longest_prompt,
        "keep_to": config.data.max_input_seq_length,
    }
    return PROMPTS, partial(render_prompts, **told, **({"tools": tools} if tools else {}))


def _of_answers(config: TrlSettings, processor: Any) -> tuple[pa.Schema, partial]:
    """Return columns and function for preferences and unpaired answers."""
    told = {
        "processor": tokenizer_of(processor),
        "variables": config.policy.tokenizer.chat_template_kwargs,
        "max_length": config.max_length,
        "cuts": config.policy.truncation_mode == "keep_start",
        "kind": config.kind,
        "joined": config.joined,
    }
    return ANSWERS[config.kind], partial(tokenize_answers, **told)


PREPARATIONS = {
    "demonstrations": _of_demonstrations,
    "prompts": _of_prompts,
    "preferences": _of_answers,
    "unpaired": _of_answers,
}
"""What prepares rows for a training, by the kind of rows."""


def parts_of(row: dict[str, Any], processor: Any) -> list[tuple[str, bool, list[int]]]:
    """Return the parts of a prepared row, to be shown: name, whether learnt, tokens."""
    if "labels" in row:
        return list(runs(row["input_ids"], row["labels"], IGNORED))
    if "prompt" in row:
        return [("prompt", False, token_ids([row["prompt"]], processor)[0])]
    return [(name.removesuffix("_ids"), name != "prompt_ids", row[name]) for name in row if name.endswith("_ids")]


def tokenize_demonstrations(
    lines: list[Line],
    processor: Any,
    max_length: int,
    variables: TemplateVariables,
    assistant_only_loss: bool = False,
) -> list[dict[str, Any]]:
    """Return tokens and labels of demonstrations, cut at `max_length`; `is_cut`, no column, marks a longer row.

    The last message is learnt; with `assistant_only_loss` (TRL's name) every message of the assistant. A message's own
    mark (scripts.rows.learning_marks) goes before both. UserError names a line whose learnt part cannot be told.
    """
    rows = []
    for line in lines:
        learnt = _learnt_places(line, assistant_only_loss)
        messages = as_chat(line.row["messages"])
        pictures = pictures_in(messages, line, processor)
        options = {"tools": line.row.get("tools") or None, **variables}
        if learnt == [len(messages) - 1] and not assistant_only_loss:
            ids, spans = _last_answer(line, messages, processor, options)
        else:
            ids, spans = _answers(line, messages, learnt, processor, options)
        labels = [IGNORED] * len(ids)
        for start, end in spans:
            labels[start:end] = ids[start:end]
        if not any(label != IGNORED for label in labels):
            raise UserError(f"{line.place}: the chat template marks no answer, so nothing would be learnt")
        cut = {"input_ids": ids[:max_length], "labels": labels[:max_length]}
        rows.append(cut | {"pictures": pictures, "is_cut": len(ids) > max_length})
    return rows


def _learnt_places(line: Line, every_answer: bool) -> list[int]:
    """Return the places of the messages of a row that are learnt; UserError for none."""
    messages = line.row["messages"]
    places = learnt_places(messages, every_answer)
    if not places:
        advice = "" if every_answer else ", set sft.assistant_only_loss: true to learn messages without a mark"
        raise UserError(
            f"{line.place}: nothing is learnt: the last message is marked so (weight 0, or train false), and no other "
            f"is marked as learnt; mark one{advice}, or leave the row out"
        )
    return places


def _last_answer(line: Line, messages: Messages, processor: Any, options: dict[str, Any]) -> tuple[list[int], Spans]:
    """Return a conversation's tokens, and the span of its last message.

    A token merged of prompt and answer is not learnt.
    """
    prompt, text = _prompt(line, messages[:-1], processor, options), _text(line, messages, processor, options)
    remedy = partial(_remedy, line, messages, messages[:-1], processor, options)
    _check_begins(line, prompt, text, "the conversation", "its last answer", remedy)
    prompt_ids, ids = token_ids([prompt, text], processor)
    start = len(prompt_ids)
    if ids[:start] != prompt_ids:
        whole, place = _expanded([text, prompt], processor)
        offsets = tokenizer_of(processor)(whole, add_special_tokens=False, return_offsets_mapping=True)
        start = sum(begin < len(place) for begin, _ in offsets["offset_mapping"])
    return ids, [(start, len(ids))]


def _answers(
    line: Line, messages: Messages, learnt: list[int], processor: Any, options: dict[str, Any]
) -> tuple[list[int], Spans]:
    """Return a conversation's tokens, and the spans of the messages at the places `learnt`.

    The chat template marks the spans (``{% generation %}``). Without marks a span is proved by tokens: the
    conversation holds the very tokens of the prompt and the message after it.
    """
    tokenizer = tokenizer_of(processor)
    if tokenizer is not processor:
        raise UserError(
            f"{line.place}: sft.assistant_only_loss, and marks (weight, train) of messages before the last, are for "
            "models without vision; leave them out"
        )
    text = _text(line, messages, processor, options)  # fails with its place
    if marks_answers(tokenizer.chat_template):
        _check_thoughts_begin(line, messages, text, processor, options)
        return _marked_answers(line, messages, learnt, processor, options)
    (ids,), spans = token_ids([text], processor), []
    for place in learnt:
        before = _prompt(line, messages[:place], processor, options)
        spans.append(_span(line, messages, place, ids, before, processor, options))
    return ids, spans


def _check_thoughts_begin(line: Line, messages: Messages, text: str, processor: Any, options: dict[str, Any]) -> None:
    """Raise UserError where the prompt of the last answer begins thoughts, and the conversation `text` does not."""
    prompt = _prompt(line, messages[:-1], processor, options)
    if begun_by(prompt):
        remedy = partial(_remedy, line, messages, messages[:-1], processor, options)
        _check_begins(line, prompt, text, "the conversation", "its last answer", remedy)


def _marked_answers(
    line: Line, messages: Messages, learnt: list[int], processor: Any, options: dict[str, Any]
) -> tuple[list[int], Spans]:
    """Return tokens and spans by the marks of the chat template, of the messages at the places `learnt` alone."""
    tokenizer = tokenizer_of(processor)
    marked = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    ids, mask = marked["input_ids"], marked["assistant_masks"]
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [(place, place + 1) for place, is_said in enumerate(mask) if is_said]
    if learnt == answers:
        return ids, spans
    within: set[int] = set()
    for place in learnt:
        before = _text(line, messages[:place], processor, options) if place else ""
        start, end = _span(line, messages, place, ids, before, processor, options)
        within.update(range(start, end))
    return ids, [span for span in spans if span[0] in within]


def _span(
    line: Line, messages: Messages, place: int, ids: list[int], before: str, processor: Any, options: dict[str, Any]
) -> tuple[int, int]:
    """Return the first token of a message, and the one behind its last, in the conversation's tokens `ids`.

    `before` is the text that precedes the message. UserError where the conversation has other tokens.
    """
    after = _text(line, messages[: place + 1], processor, options)
    asked, said = token_ids([before, after], processor)
    if ids[: len(said)] == said and said[: len(asked)] == asked:
        return len(asked), len(said)
    shipped = training_template_of(tokenizer_of(processor).chat_template)
    advice = f"TRL's {shipped}, which is this one with such marks" if shipped else "one with such marks"
    raise UserError(
        f"{line.place}: messages[{place}]: begin and end of the answer cannot be proved: the chat "
        "template prints the answer differently in a longer conversation (as without reasoning), or tokens "
        "merge with the text before. sft.assistant_only_loss, or a mark (weight, train) of a message before the last, "
        f"needs {{% generation %}} in the template; name {advice} as policy.tokenizer.chat_template"
    )


def _prompt(line: Line, messages: Messages, processor: Any, options: dict[str, Any]) -> str:
    return _text(line, messages, processor, options | {"add_generation_prompt": True})


def _text(line: Line, messages: Messages, processor: Any, options: dict[str, Any]) -> str:
    """Return messages in the chat template; UserError names the line of a failure."""
    try:
        return render(messages, processor, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(f"{line.place}: the chat template fails: {error}") from None


def _check_begins(line: Line, prompt: str, text: str, what: str, of: str, remedy: Callable[[], str]) -> None:
    """Raise UserError where a text does not begin with its prompt, so the answer's start is unknown.

    `remedy` finds what to do.
    """
    if text.startswith(prompt):
        return
    place = common_length(prompt, text)
    raise UserError(
        f"{line.place}: by the chat template {what} does not begin with the prompt of {of}, so training and "
        f"generation would differ: the prompt goes on with {prompt[place : place + SHOWN]!r}, {what} with "
        f"{text[place : place + SHOWN]!r}; {remedy()}"
    )


def _remedy(line: Line, whole: Messages, asked: Messages, processor: Any, options: dict[str, Any]) -> str:
    """Say what would let a conversation begin with the prompt of its answer: what helps this row, as tried.

    `whole` is the conversation, `asked` the part before the answer.
    """
    begins = partial(_begins, line, whole, asked, processor)
    key = "policy.tokenizer.chat_template_kwargs"
    if "enable_thinking" in options:
        thinking = {name: value for name, value in options.items() if name != "enable_thinking"}
        if begins(thinking):
            return f"leave enable_thinking out of {key} for rows with thoughts"
    elif begins(options | {"enable_thinking": False}):
        return f"say {key}: {{enable_thinking: false}} for rows without thoughts"
    shipped = training_template_of(tokenizer_of(processor).chat_template)
    if shipped and begins(options | {"chat_template": read_template(shipped)}):
        return f"name TRL's {shipped}, which keeps what this one leaves out, as policy.tokenizer.chat_template"
    return _remedy_of_thoughts(_prompt(line, asked, processor, options), whole[len(asked)])


def _remedy_of_thoughts(prompt: str, answer: dict[str, Any]) -> str:
    """Say what to do with an answer whose prompt begins thoughts; in any other case only another template helps."""
    other = "name another template as policy.tokenizer.chat_template"
    begun = begun_by(prompt)
    if not begun:
        return other
    end = begun.strip().replace("<", "</", 1)
    form = f"{begun!r}, the thoughts and {end!r}"
    if answer.get("reasoning_content"):
        return f"the template prints no reasoning_content: let the answers' content begin with {form}, or {other}"
    if end in text_of(answer.get("content")):
        kept = "one that prints the thoughts of the last answer, such as TRL's deepseek_r1_distill_training"
        return f"the answers are to begin with {form}; where they do, the template leaves these out: {other}, {kept}"
    return (
        f"the prompt begins thoughts, and this row has none: let the answers begin with {form}, or {other}, one whose "
        "prompt begins no thoughts"
    )


def _begins(line: Line, whole: Messages, asked: Messages, processor: Any, options: dict[str, Any]) -> bool:
    """Whether a conversation begins with the prompt of its answer by other options of the chat template."""
    try:
        return _text(line, whole, processor, options).startswith(_prompt(line, asked, processor, options))
    except UserError:
        return False


def tokenize_answers(
    lines: list[Line],
    processor: Any,
    max_length: int,
    variables: TemplateVariables,
    cuts: bool = False,
    kind: str = "preferences",
    joined: bool = False,
) -> list[dict[str, Any]]:
    """Return the tokens of prompts and answers, tokenized apart as the model generates.

    With `joined` an answer begins with the prompt, tokenized together as a reward model reads them. A row above
    `max_length` is a UserError; with `cuts` answers lose their end, and a prompt without room for an answer its start.
    """
    rows, columns = [], ANSWERS[kind].names
    names = [column.removesuffix("_ids") for column in columns if column.endswith("_ids")]
    for line in lines:
        pair = KINDS[kind].example(line.row)
        options = {"tools": pair.tools, **variables}
        prompt = _prompt(line, as_chat(pair.prompt), processor, options)
        texts = ["" if joined else prompt]
        for name, answer in zip(names[1:], pair.answers, strict=True):
            text = _text(line, as_chat([*pair.prompt, *answer]), processor, options)
            remedy = partial(_remedy, line, as_chat([*pair.prompt, *answer]), as_chat(pair.prompt), processor, options)
            _check_begins(line, prompt, text, f"the conversation with {name}", "the pair", remedy)
            texts.append(text if joined else text.removeprefix(prompt))
        prompt_ids, *answers = token_ids(texts, processor)
        length = len(prompt_ids) + max(map(len, answers))
        if cuts:
            prompt_ids = prompt_ids[1 - max_length :]
            answers = [ids[: max_length - len(prompt_ids)] for ids in answers]
        elif length > max_length:
            raise UserError(
                f"{line.place}: prompt and answer have {length} tokens, more than the {max_length} of "
                "policy.max_total_sequence_length; raise that, drop the row, or set policy.truncation_mode: keep_start"
            )
        row = {f"{name}_ids": ids for name, ids in zip(names, (prompt_ids, *answers), strict=True)}
        rows.append(
            row | {name: line.row[name] for name in columns if name not in row} | {"is_cut": length > max_length}
        )
    return rows


def render_prompts(
    lines: list[Line],
    processor: Any,
    max_length: int,
    keep_to: int | None,
    variables: TemplateVariables,
    tools: dict[str, list[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return prompts in the chat template with their rows' text; UserError above `max_length` tokens.

    Prompts above `keep_to` are left out instead. `tools` maps environments to tools.
    """
    rows = []
    for line in lines:
        if tools and tools_of(line.row):
            raise UserError(
                f"{line.place}: declares tools, but TRL cannot show tools of rows beside environments with tools; give "
                "rows with tools a separate blend and stage"
            )
        messages = prompt_of(line.row)
        has_pictures = bool(pictures_in(messages, line, processor))
        shown = (tools or {}).get(line.row["agent_ref"]["name"]) or tools_of(line.row)
        prompt = _prompt(line, messages, processor, variables | {"tools": shown})
        length = len(token_ids([prompt], processor)[0])
        if keep_to is None and length > max_length:
            raise UserError(
                f"{line.place}: the prompt has {length} tokens, but max_total_sequence_length less max_new_tokens "
                f"leaves {max_length}; raise policy.max_total_sequence_length, or leave such rows out by "
                "data.max_input_seq_length"
            )
        if keep_to is None or length <= keep_to:
            rows.append({"prompt": prompt, "row": line.text, "line": line.number, "has_pictures": has_pictures})
    return rows


def token_ids(texts: list[str], processor: Any) -> list[list[int]]:
    """Return the tokens of texts in the chat template, with all tokens of a picture in its place."""
    return tokenizer_of(processor)(_expanded(texts, processor), add_special_tokens=False)["input_ids"]


def _expanded(texts: list[str], processor: Any) -> list[str]:
    """Return texts with all tokens of a picture in its place; pictures are scaled to one size."""
    picture = getattr(processor, "image_token", None)
    if picture is None:
        return texts
    expanded = processor(text=[picture], images=[Image.new("RGB", (1, 1))])["input_ids"][0]
    return [text.replace(picture, picture * len(expanded)) for text in texts]


def pictures_in(conversation: Messages, line: Line, processor: Any) -> list[str]:
    """Return a row's pictures; UserError where a picture is damaged, or the model sees none."""
    pictures, token = pictures_of(conversation), getattr(processor, "image_token", None)
    if pictures and tokenizer_of(processor) is processor:
        raise UserError(f"{line.place}: shows a picture, but the recipe's model has no vision")
    if token is not None and any(token in text_of(message.get("content")) for message in conversation):
        raise UserError(f"{line.place}: a text holds {token}, the sign of a picture; remove the token")
    for picture in pictures:
        try:
            open_picture(picture)
        except UserError as error:
            raise UserError(f"{line.place}: {error}") from None
    return pictures
