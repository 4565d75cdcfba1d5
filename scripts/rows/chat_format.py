"""A model's chat format: chat template, special tokens, vocabulary, equal from stage to stage.

Read from a folder's files without transformers, so that planning needs no trainer.
"""

import json
import re
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from scripts.errors import UserError
from scripts.files import read_json, sha256_file, sha256_text, write_json, write_text
from scripts.recipe.sampling import OWN
from scripts.recipe.strict import nearest
from scripts.rows.messages import common_length

TEMPLATE, SETTINGS, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token")
TRL = find_spec("trl")
SHIPPED = Path(TRL.submodule_search_locations[0] if TRL else "no trl", "chat_templates")
"""The folder of TRL's chat templates, found without importing TRL."""
SHOWN = 60
TEMPLATE_DATE = date(2024, 7, 26)
"""What chat templates print as the day's date where no recipe says: the date in Llama 3's templates."""
HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
OF_TOKENIZER = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|(pre|video_pre)?processor|.*\.(model|tiktoken)$"
)
"""The names of a model's files of which its tokenizer or processor is made."""
_GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")  # templates mark by it what the assistant says


def read_template(named: str) -> str:
    """Return the chat template (Jinja) named by a recipe; UserError if there is none.

    Names are a file (from the project's root), a template shipped by TRL (qwen3_training), a model's folder, or the
    template in full.
    """
    path, shipped = Path(named), SHIPPED / f"{named}.jinja"
    if "{%" in named or "{{" in named:
        return named
    if path.is_dir():
        if (found := chat_template_of(path)) is None:
            raise UserError(f"{named}: a model without a chat template")
        return found
    try:
        return (shipped if shipped.is_file() else path).read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [each.stem for each in SHIPPED.glob("*.jinja") if not each.stem.endswith("_training")]
        meant = "" if "." in path.name or "/" in named else f", and no template that TRL ships{nearest(named, names)}"
        of_hub = (
            f"; of a model on the hub, take the file: hf download {named} {TEMPLATE}" if HUB.fullmatch(named) else ""
        )
        raise UserError(f"{path}: no such file{meant}{of_hub}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def compiled_template(chat_template: str, folder: Path, signs: tuple[str, str] = ("", "")) -> Template:
    """Compile a chat template as transformers does, with the special tokens of a model's folder.

    The day's date is the pinned one, as `scripts.model.processor` lets transformers have it. `signs` are put around the
    text that the template marks as the assistant's (``{% generation %}``). TemplateError for a broken template, and in
    rendering for a refused conversation.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["strftime_now"] = pinned_now
    environment.globals["raise_exception"] = _refuse
    environment.globals |= _named_tokens(folder)
    environment.filters["said"] = lambda text: f"{signs[0]}{text}{signs[1]}"
    return environment.from_string(_GENERATION.sub(_as_filter, chat_template))


def _named_tokens(folder: Path) -> dict[str, str | None]:
    """Return the special tokens that a model's folder names, which chat templates may print."""
    settings = _json(folder / SETTINGS).items()
    return {name: _text(value) for name, value in settings if name.endswith("_token") and value}


def facts_of_rendering(chat_template: str | None, folder: Path) -> dict[str, Any]:
    """Return all that `compiled_template` makes a template's text of, as JSON: two of equal facts print the same."""
    if chat_template is None:
        return {"template": None}
    facts: dict[str, Any] = {"template": sha256_text(chat_template), "tokens": _named_tokens(folder)}
    if "strftime_now" in chat_template:
        facts["day"] = str(PinnedClock.day)
    return facts


def contents_of_tokenizer(folder: Path) -> dict[str, str]:
    """Return the hashes of a folder's files of which transformers makes a tokenizer or processor, by name."""
    found = {}
    for path in sorted(folder.glob("*")):
        if OF_TOKENIZER.match(path.name) and path.is_file():
            found[path.name] = sha256_file(path)
    return found


def template_tree(chat_template: str) -> nodes.Template:
    """Return the syntax tree of a chat template; TemplateError for a broken one."""
    environment = compiled_template("", Path()).environment
    return environment.parse(_GENERATION.sub(_as_filter, chat_template))


def _as_filter(generation: re.Match[str]) -> str:
    """Return the beginning or end of a filter in place of that of a generation, with the same control of whitespace."""
    before, is_end, after = generation.groups()
    return f"{{%{before} {'endfilter' if is_end else 'filter said'} {after}%}}"


class PinnedClock:
    """The day that chat templates print as the day's: the same whenever a stage trains, is scored or answers."""

    day: ClassVar[date] = TEMPLATE_DATE

    @classmethod
    def now(cls) -> datetime:
        """Return the day's beginning."""
        return datetime(cls.day.year, cls.day.month, cls.day.day)


def pin_date(day: date | None) -> None:
    """Let chat templates print a day in this process, by a recipe's model.template_date; None: `TEMPLATE_DATE`."""
    PinnedClock.day = day or TEMPLATE_DATE


def pinned_now(form: str) -> str:
    """Return the pinned day in a form of strftime, as chat templates ask for it."""
    return PinnedClock.now().strftime(form)


def prints_date(chat_template: str, folder: Path, variables: dict[str, Any] | None = None) -> bool:
    """Whether a chat template prints the day's date, with its variables; by its text where it does not render."""
    if "strftime_now" not in chat_template:
        return False
    template, pinned, texts = compiled_template(chat_template, folder), PinnedClock.day, set[str]()
    talk = [{"role": "user", "content": "?"}]
    try:
        for day in (date(2001, 2, 3), date(2014, 5, 16)):
            PinnedClock.day = day
            texts.add(template.render(messages=talk, add_generation_prompt=True, **(variables or {})))
    except (TemplateError, TypeError, ValueError):
        return True
    finally:
        PinnedClock.day = pinned
    return len(texts) > 1


def _refuse(why: str) -> None:
    raise TemplateError(why)


def training_template_of(chat_template: str) -> str | None:
    """Return the name of TRL's training version of a template: marked, and equal in every turn."""
    for path in SHIPPED.glob("*_training.jinja"):
        plain = path.with_name(path.name.replace("_training", ""))
        if plain.is_file() and plain.read_text(encoding="utf-8") == chat_template:
            return path.stem
    return None


def marks_answers(chat_template: str) -> bool:
    """Whether a chat template marks the assistant's text by ``{% generation %}``."""
    return _GENERATION.search(chat_template) is not None


def chat_template_of(folder: Path) -> str | None:
    """Return a model's chat template; a template file goes before the tokenizer's settings."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = _json(folder / SETTINGS).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each["template"] for each in template if each["name"] == OWN), None)
    return template if isinstance(template, str) else None


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a tokenizer or processor."""
    return getattr(processor, "tokenizer", processor)


def write_template(folder: Path, chat_template: str) -> None:
    """Replace the chat template in a folder of links to a model's files, in every file that has one."""
    for path in folder.glob("chat_template*"):
        path.unlink()
    write_text(folder / TEMPLATE, chat_template)
    for path in (*folder.glob(SETTINGS), *folder.glob("*processor_config.json")):
        settings = read_json(path)
        if settings.pop("chat_template", None) is not None:
            path.unlink()
            write_json(path, settings)


@dataclass(frozen=True)
class ChatFormat:
    """A model's chat template, special tokens, and folder of the tokenizer."""

    chat_template: str | None
    tokens: dict[str, Any]
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the chat format of a model in Hugging Face's format."""
        settings, generation = _json(folder / SETTINGS), _json(folder / GENERATION)
        tokens = {name: _text(settings.get(name)) for name in SPECIAL}
        for name in ("eos_token_id", "pad_token_id"):
            value = generation.get(name)
            tokens[f"{GENERATION}'s {name}"] = sorted(value) if isinstance(value, list) else value
        return cls(chat_template_of(folder), tokens, folder)

    def with_template(self, chat_template: str | None) -> Self:
        """Return a copy with another chat template; None keeps the template."""
        return self if chat_template is None else replace(self, chat_template=chat_template)

    def changes(self, other: "ChatFormat") -> list[str]:
        """Return the differences from another chat format, a phrase each."""
        found = []
        if (self.chat_template or "") != (other.chat_template or ""):
            found.append(f"the chat template ({_first_difference(self.chat_template, other.chat_template)})")
        for name, value in self.tokens.items():
            is_stated = name in SPECIAL or None not in (value, other.tokens[name])  # not all have generation settings
            if is_stated and other.tokens[name] != value:
                found.append(f"{name} ({value!r}, now {other.tokens[name]!r})")
        if problem := _tokenizers_differ(self.folder / "tokenizer.json", other.folder / "tokenizer.json"):
            found.append(problem)
        return found


def _json(path: Path) -> dict[str, Any]:
    """Read a file of settings; empty if missing or broken."""
    try:
        content = read_json(path)
    except (OSError, UserError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _first_difference(before: str | None, after: str | None) -> str:
    """Quote the first different line, from shortly before the difference."""
    before, after = before or "", after or ""
    place = common_length(before, after)
    start = max(before.rfind("\n", 0, place) + 1, place - SHOWN // 2)
    old, new = (text[start:].partition("\n")[0][:SHOWN] for text in (before, after))
    return f"line {before.count(chr(10), 0, place) + 1} was {old!r}, now {new!r}"


def _tokenizers_differ(before: Path, after: Path) -> str | None:
    """Return the difference of two tokenizers beyond padding and truncation; None if equal or missing."""
    if not (before.is_file() and after.is_file()) or before.read_bytes() == after.read_bytes():
        return None
    old, new = (Tokenizer.from_file(str(path)) for path in (before, after))
    words, others = old.get_vocab(), new.get_vocab()
    if words != others:
        name, _ = min(words.items() ^ others.items(), key=lambda item: item[::-1])
        differs = f"{name!r} was {words.get(name)}, now {others.get(name)}"
        return f"the vocabulary ({len(words)} tokens, now {len(others)}; {differs})"
    for tokenizer in (old, new):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return None if old.to_str() == new.to_str() else "the tokenizer (same tokens, but how texts become them)"
