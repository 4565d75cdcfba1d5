"""How rows become the tokens that a stage trains on, and which of them it learns. It needs neither torch nor TRL.

Texts are rendered in the chat template and tokenized as the template alone says, without special tokens of the
tokenizer's own, so a first token that both would give is there once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from jinja2 import TemplateError
from PIL import Image

from scripts.errors import UserError
from scripts.recipe.sampling import TemplateVariables
from scripts.rows.chat_format import common_length, marks_answers, tokenizer_of, training_template_of
from scripts.rows.jsonl import read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.messages import text_of
from scripts.rows.prompts import Messages, as_chat, open_picture, pictures_of, prompt_of, render, tools_of

TOKENS = pa.list_(pa.int32())
DEMONSTRATIONS = pa.schema({"input_ids": TOKENS, "labels": TOKENS, "pictures": pa.list_(pa.string())})
PAIRS = pa.schema(dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), TOKENS))
PROMPTS = pa.schema({"prompt": pa.string(), "row": pa.string(), "line": pa.int64(), "has_pictures": pa.bool_()})
IGNORED = -100
"""The label of a token that is not learnt."""
SHOWN = 40


class Line(NamedTuple):
    """A row of a split, with its line number and its text; `place` names it in messages."""

    number: int
    place: str
    text: str
    row: dict[str, Any]


def lines_of(split: Path) -> Iterator[Line]:
    """The lines of a split, in order."""
    for number, line, row in read_rows(split):
        yield Line(number, f"{split}:{number}", line.decode(), row)


def tokenize_demonstrations(
    lines: list[Line],
    processor: Any,
    max_length: int,
    variables: TemplateVariables,
    assistant_only_loss: bool = False,
) -> list[dict[str, Any]]:
    """Token ids and labels of demonstrations, cut at `max_length`.

    Learnt is the last message, the assistant's, or with `assistant_only_loss` every message of the assistant's, as
    TRL's setting of that name does. `is_cut`, which is no column, says whether a row had more. UserError names a line
    of which nobody can tell what is to be learnt.
    """
    conversations = [as_chat(line.row["messages"]) for line in lines]
    options = [{"tools": line.row.get("tools") or None, **variables} for line in lines]
    pictures = [pictures_in(messages, line, processor) for messages, line in zip(conversations, lines, strict=True)]
    if assistant_only_loss:
        each = zip(lines, conversations, options, strict=True)
        ids, labels = zip(*(_all_answers(*arguments, processor) for arguments in each), strict=True)
    else:
        ids, labels = _last_answers(lines, conversations, processor, options)
    return [
        {
            "input_ids": full[:max_length],
            "labels": learnt[:max_length],
            "pictures": uris,
            "is_cut": len(full) > max_length,
        }
        for full, learnt, uris in zip(ids, labels, pictures, strict=True)
    ]


def _last_answers(
    lines: list[Line], conversations: list[Messages], processor: Any, options: list[dict[str, Any]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and labels of conversations whose last message alone is learnt.

    Where prompt and answer merge into other tokens than each by itself, a token that holds a piece of both is not
    learnt, and those after it are.
    """
    each = list(zip(lines, conversations, options, strict=True))
    asked = [_prompt(line, messages[:-1], processor, some) for line, messages, some in each]
    texts = [_text(line, messages, processor, some) for line, messages, some in each]
    all_ids, labels = token_ids(texts, processor), []
    for line, prompt, prompt_ids, text, ids in zip(
        lines, asked, token_ids(asked, processor), texts, all_ids, strict=True
    ):
        _check_begins(line, prompt, text, "the conversation", "its last answer")
        start = len(prompt_ids)
        if ids[:start] != prompt_ids:
            whole, place = _expanded([text, prompt], processor)
            offsets = tokenizer_of(processor)(whole, add_special_tokens=False, return_offsets_mapping=True)
            start = sum(begin < len(place) for begin, _ in offsets["offset_mapping"])
        labels.append(_labels(line, ids, [(start, len(ids))]))
    return all_ids, labels


def _all_answers(
    line: Line, messages: Messages, options: dict[str, Any], processor: Any
) -> tuple[list[int], list[int]]:
    """Ids and labels of a conversation of which all that the assistant says is learnt.

    The chat template's marks (``{% generation %}``) say what that is. Without them it is what each message adds to
    the prompt that asks for it, which is proved by tokens: at its place the conversation holds the very tokens of
    that prompt and of the message after it.
    """
    tokenizer = tokenizer_of(processor)
    if tokenizer is not processor:
        raise UserError(f"{line.place}: sft.assistant_only_loss is for models without vision; leave it out")
    if marks_answers(tokenizer.chat_template):
        _text(line, messages, processor, options)  # fails with its place
        marked = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        ids, mask = marked["input_ids"], marked["assistant_masks"]
        return ids, _labels(line, ids, [(place, place + 1) for place, is_said in enumerate(mask) if is_said])
    (ids,), spans = token_ids([_text(line, messages, processor, options)], processor), []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _prompt(line, messages[:place], processor, options)
        asked, said = token_ids([before, _text(line, messages[: place + 1], processor, options)], processor)
        if ids[: len(said)] != said or said[: len(asked)] != asked:
            shipped = training_template_of(tokenizer.chat_template)
            advice = f"TRL's {shipped}, which is this one with such marks" if shipped else "one with such marks"
            raise UserError(
                f"{line.place}: messages[{place}]: where this answer begins and ends cannot be proved: the chat "
                "template prints it otherwise where more is said after it (as without its reasoning), or its tokens "
                "merge with those before it. sft.assistant_only_loss needs {% generation %} in the template; name "
                f"{advice} as policy.tokenizer.chat_template"
            )
        spans.append((len(asked), len(said)))
    return ids, _labels(line, ids, spans)


def _prompt(line: Line, messages: Messages, processor: Any, options: dict[str, Any]) -> str:
    return _text(line, messages, processor, options | {"add_generation_prompt": True})


def _text(line: Line, messages: Messages, processor: Any, options: dict[str, Any]) -> str:
    """Messages in the chat template; UserError names the line for which that fails."""
    try:
        return render(messages, processor, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(f"{line.place}: the chat template fails: {error}") from None


def _labels(line: Line, ids: list[int], spans: list[tuple[int, int]]) -> list[int]:
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    if not any(label != IGNORED for label in labels):
        raise UserError(f"{line.place}: by the chat template nothing of it is an answer, so nothing would be learnt")
    return labels


def _check_begins(line: Line, prompt: str, text: str, what: str, of: str) -> None:
    """UserError where a text does not begin with a prompt, so that where the answer begins cannot be told."""
    if text.startswith(prompt):
        return
    place = common_length(prompt, text)
    raise UserError(
        f"{line.place}: by the chat template {what} does not begin with the prompt of {of}, so what is learnt would "
        f"not be what is asked: the prompt goes on with {prompt[place : place + SHOWN]!r}, {what} with "
        f"{text[place : place + SHOWN]!r}; name another template as policy.tokenizer.chat_template"
    )


def tokenize_pairs(
    lines: list[Line], processor: Any, max_length: int, variables: TemplateVariables, cuts: bool = False
) -> list[dict[str, list[int]]]:
    """Token ids of prompts, chosen and rejected answers in the chat template, answers apart from their prompt.

    So are they when the model is asked. A pair that is too long is a UserError or, where it `cuts`, loses the end of
    its answers; of a prompt that fills all by itself, the start is lost, so that each answer keeps a token.
    """
    examples = [KINDS["preferences"].example(line.row) for line in lines]
    options = [{"tools": example.tools, **variables} for example in examples]
    each = list(zip(lines, examples, options, strict=True))
    asked = [_prompt(line, as_chat(pair.prompt), processor, some) for line, pair, some in each]

    def answers(place: int) -> list[str]:
        found, name = [], KINDS["preferences"].answers[place]
        for (line, pair, some), prompt in zip(each, asked, strict=True):
            text = _text(line, as_chat([*pair.prompt, *pair.answers[place]]), processor, some)
            _check_begins(line, prompt, text, f"the conversation with {name}", "the pair")
            found.append(text.removeprefix(prompt))
        return found

    columns = [token_ids(texts, processor) for texts in (asked, answers(0), answers(1))]
    lengths = [len(prompt) + max(map(len, others)) for prompt, *others in zip(*columns, strict=True)]
    if cuts:
        columns[0] = [prompt[1 - max_length :] for prompt in columns[0]]
        columns[1:] = [
            [ids[: max_length - len(prompt)] for prompt, ids in zip(columns[0], column, strict=True)]
            for column in columns[1:]
        ]
    for line, length in zip(lines, lengths, strict=True):
        if length > max_length and not cuts:
            raise UserError(
                f"{line.place}: prompt and answer have {length} tokens, more than the {max_length} of "
                "policy.max_total_sequence_length; raise that, drop the row, or set policy.truncation_mode: keep_start"
            )
    names = *PAIRS.names, "is_cut"
    return [
        dict(zip(names, (*pair, length > max_length), strict=True))
        for *pair, length in zip(*columns, lengths, strict=True)
    ]


def render_prompts(
    lines: list[Line],
    processor: Any,
    max_length: int,
    keep_to: int | None,
    variables: TemplateVariables,
    tools: dict[str, list[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Prompts in the chat template, beside the text of their rows; UserError for one that is too long.

    Those longer than `keep_to` are left out. `tools` are those of environments that have some, by their names.
    """
    for line in lines if tools else ():
        if tools_of(line.row):
            raise UserError(
                f"{line.place}: declares tools of its own, which TRL cannot show beside environments with tools; give "
                "such rows a blend and a stage of their own"
            )
    shown = tools or {}
    messages = [prompt_of(line.row) for line in lines]
    has_pictures = [bool(pictures_in(each, line, processor)) for each, line in zip(messages, lines, strict=True)]
    options = [variables | {"tools": shown.get(line.row["agent_ref"]["name"]) or tools_of(line.row)} for line in lines]
    asked = [_prompt(*each, processor, some) for *each, some in zip(lines, messages, options, strict=True)]
    lengths = [len(ids) for ids in token_ids(asked, processor)]
    for line, length in zip(lines, lengths, strict=True):
        if keep_to is None and length > max_length:
            raise UserError(
                f"{line.place}: the prompt has {length} tokens, but max_total_sequence_length less max_new_tokens "
                f"leaves {max_length}; raise policy.max_total_sequence_length, or leave such rows out by "
                "data.max_input_seq_length"
            )
    columns = zip(asked, [line.text for line in lines], [line.number for line in lines], has_pictures, strict=True)
    rows = [dict(zip(PROMPTS.names, row, strict=True)) for row in columns]
    return [row for row, length in zip(rows, lengths, strict=True) if keep_to is None or length <= keep_to]


def token_ids(texts: list[str], processor: Any) -> list[list[int]]:
    """The tokens of texts that are in the chat template already, with as many in a picture's place as it has."""
    return tokenizer_of(processor)(_expanded(texts, processor), add_special_tokens=False)["input_ids"]


def _expanded(texts: list[str], processor: Any) -> list[str]:
    """Texts with as many picture tokens in a picture's place as it has. All pictures are scaled to one size."""
    picture = getattr(processor, "image_token", None)
    if picture is None:
        return texts
    expanded = processor(text=[picture], images=[Image.new("RGB", (1, 1))])["input_ids"][0]
    return [text.replace(picture, picture * len(expanded)) for text in texts]


def pictures_in(conversation: Messages, line: Line, processor: Any) -> list[str]:
    """The pictures that a row shows; UserError where they are none, or the model cannot see them."""
    pictures, token = pictures_of(conversation), getattr(processor, "image_token", None)
    if pictures and tokenizer_of(processor) is processor:
        raise UserError(f"{line.place}: shows a picture, but the recipe's model has no vision")
    if token is not None and any(token in text_of(message.get("content")) for message in conversation):
        raise UserError(f"{line.place}: a text holds {token}, which stands for a picture; take it out")
    for picture in pictures:
        try:
            open_picture(picture)
        except UserError as error:
            raise UserError(f"{line.place}: {error}") from None
    return pictures
