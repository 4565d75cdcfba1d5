"""A model's chat format: chat template, special tokens, vocabulary, equal from stage to stage.

Read from a folder's files without transformers, so that planning needs no trainer.
"""

import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, Self

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from scripts.errors import UserError
from scripts.files import read_json, write_json, write_text
from scripts.recipe.sampling import OWN

TEMPLATE, SETTINGS, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token")
SHOWN = 60
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # by which templates mark what the assistant says


def read_template(named: str) -> str:
    """Return the chat template (Jinja) named by a recipe; UserError if there is none.

    Names are a file (from the project's root), a template shipped by TRL (qwen3_training), a model's folder, a model of
    the hub (organisation/name, or organisation/name@revision), or the template in full.
    """
    path = Path(named)
    if "{%" in named or "{{" in named:
        return named
    if path.is_dir():
        found = chat_template_of(path)
    elif path.suffix in (".jinja", ".j2") or path.is_file() or named.startswith(("/", ".")):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
    elif "/" in named:
        found = _template_on_hub(*named.split("@", 1))
    elif (shipped := _shipped() / f"{named}.jinja").is_file():
        return shipped.read_text(encoding="utf-8")
    else:
        raise UserError(
            f"{named}: no file ({path}), and none of the templates that TRL ships: {_shipped()}"
            if _shipped().is_dir()
            else f"{named}: no file ({path}); for one that TRL ships, TRL has to be installed here (envs/trl.txt)"
        )
    if found is None:
        raise UserError(f"{named}: a model without a chat template")
    return found


def compiled_template(chat_template: str, folder: Path) -> Template:
    """Compile a chat template as transformers does, with the special tokens of a model's folder.

    TemplateError for a broken template, and in rendering for a refused conversation.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    environment.globals["raise_exception"] = _refuse
    config = folder / SETTINGS
    for name, value in (json.loads(config.read_bytes()) if config.is_file() else {}).items():
        if name.endswith("_token") and value:
            environment.globals[name] = value["content"] if isinstance(value, dict) else value
    return environment.from_string(_GENERATION.sub("", chat_template))


def _refuse(why: str) -> None:
    raise TemplateError(why)


def _shipped() -> Path:
    """Return the folder of TRL's chat templates without importing TRL."""
    spec = find_spec("trl")
    return Path(spec.submodule_search_locations[0] if spec else "no trl", "chat_templates")


def _template_on_hub(repository: str, revision: str | None = None) -> str | None:
    """Return the chat template of a model on the hub, from the cache after the first request."""
    # Each call of Snakemake reads this module; the hub's client takes a tenth of a second.
    from huggingface_hub import errors as hub  # noqa: PLC0415
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415

    for name in (TEMPLATE, SETTINGS):
        try:
            path = try_to_load_from_cache(repository, name, revision=revision)
            if path is None:
                path = hf_hub_download(repository, name, revision=revision)
        except hub.RemoteEntryNotFoundError:
            continue
        except (OSError, hub.EntryNotFoundError, hub.HfHubHTTPError, hub.HFValidationError) as error:
            raise UserError(
                f"{repository}: no file of this project, and its chat template cannot be had from the hub: {error}"
            ) from None
        if isinstance(path, str) and (found := chat_template_of(Path(path).parent)):
            return found
    return None


def training_template_of(chat_template: str) -> str | None:
    """Return the name of TRL's training version of a template: marked, and equal in every turn."""
    for path in _shipped().glob("*_training.jinja"):
        plain = path.with_name(path.name.replace("_training", ""))
        if plain.is_file() and plain.read_text(encoding="utf-8") == chat_template:
            return path.stem
    return None


def marks_answers(chat_template: str) -> bool:
    """Whether a chat template marks the assistant's text by ``{% generation %}``."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", chat_template) is not None


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
    except (OSError, ValueError, UserError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def common_length(text: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return sum(1 for _ in alike)


def _first_difference(before: str | None, after: str | None) -> str:
    """Quote the first different line, from shortly before the difference."""
    lines = zip_longest((before or "").splitlines(keepends=True), (after or "").splitlines(keepends=True), fillvalue="")
    number, old, new = next((number, *pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    start = max(0, common_length(old, new) - SHOWN // 2)
    return f"line {number} was {old[start : start + SHOWN]!r}, now {new[start : start + SHOWN]!r}"


def _tokenizers_differ(before: Path, after: Path) -> str | None:
    """Return the difference of two tokenizers beyond padding and truncation; None if equal or missing."""
    if not (before.is_file() and after.is_file()) or before.read_bytes() == after.read_bytes():
        return None
    old, new = (Tokenizer.from_file(str(path)) for path in (before, after))
    words, others = old.get_vocab(), new.get_vocab()
    if words != others:
        name = min(
            (word for word in words.keys() | others.keys() if words.get(word) != others.get(word)),
            key=lambda word: (words.get(word, len(words)), word),
        )
        return (
            f"the vocabulary ({len(words)} tokens, now {len(others)}; {name!r} was {words.get(name)}, now "
            f"{others.get(name)})"
        )
    for tokenizer in (old, new):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return None if old.to_str() == new.to_str() else "the tokenizer (same tokens, but how texts become them)"
