"""Make the pages of the site in build/docs: docs/, README.md as its index, and the reference.

    python -m docs.build

The reference comes from config/schema and from the parser of `stagecoach`. Links out of docs/ become links to the
repository, and links to README.md links to the index. `make docs` builds the site. The repository's address is
printed: REPOSITORY, else the checkout's `origin`, else a placeholder.
"""

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.backends.trl.settings import STAGES
from scripts.commands.arguments import command_parser
from scripts.stage.provenance import git

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "https://github.com/OWNER/stagecoach"
REMOTE = re.compile(r"(?:https://|ssh://git@|git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?")
CASES = {settings.__name__: f"algorithm: {name}" for name, settings in STAGES.items()}
CASES |= {"NemoRlSettings": "backend: nemo_rl", "RandomModel": "hidden_size: ...", "PretrainedModel": "name: ..."}
CASES |= {
    "PublishedBlend": "file: ...",
    "SynthesizedBlend": "rows: ...",
    "GeneratedBlend": "select: ...",
    "ImagesBlend": "format: mmpr",
}
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SETTINGS = {
    "recipe": "Keys of a recipe: `config/recipes/*.yaml`",
    "site": "Keys of a site: `config/sites/*.yaml`",
    "config": "Keys of `config/config.yaml`, and of `--config`",
}


def repository() -> str:
    """The repository's address for a browser."""
    remote = REMOTE.fullmatch(git(ROOT, "remote", "get-url", "origin") or "")
    return os.environ.get("REPOSITORY") or (f"https://{remote[1]}/{remote[2]}" if remote else PLACEHOLDER)


def with_links(text: str, page: Path, repository: str) -> str:
    """The text of a page of the repository with links that work on the site."""

    def link(match: re.Match) -> str:
        target = Path(os.path.normpath(page.parent / match[2]))
        if target == Path("README.md"):
            target = Path("docs/index.md")
        if not target.is_relative_to("docs"):
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"{match[1]}{repository}/{kind}/main/{target}{match[3] or ''})"
        here = page.parent if page.is_relative_to("docs") else Path("docs")
        return f"{match[1]}{os.path.relpath(target, here)}{match[3] or ''})"

    return LINK.sub(link, text)


@dataclass
class Place:
    """Where a model's keys stand in the file; `case` is the model's own fixed key, `cases` all keys that lead there."""

    path: str
    case: str
    cases: dict[str, None] = field(default_factory=dict)


def places_of(schema: dict) -> dict[str, Place]:
    """The place of each model of a schema, in the order of the file's keys."""
    found: dict[str, Place] = {}

    def walk(path: str, model: dict, case: str) -> None:
        for key, value in model.get("properties", {}).items():
            for name, below in models_in(value):
                inner = schema["$defs"][name]
                fixed = [
                    f"{of}: {each['const']}" for of, each in inner.get("properties", {}).items() if "const" in each
                ]
                own = CASES.get(name) or next(iter(fixed), "")
                place = found.setdefault(name, Place(".".join(filter(None, (path, key, below))), own))
                place.cases[own or case] = None
                walk(place.path, inner, own or case)

    walk("", schema, "")
    return found


def models_in(value: dict, below: str = "") -> Iterator[tuple[str, str]]:
    """The models that a value may be, each with the path below the value's key."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2], below
    for choice in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from models_in(choice, below)
    for inner in (*value.get("patternProperties", {}).values(), value.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from models_in(inner, "NAME")
    if "items" in value:
        yield from models_in(value["items"], below)


def type_of(schema: dict, places: dict[str, Place]) -> str:
    """What a value may be, in Markdown; a model is a link to its table."""
    kind = schema.get("type")
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{places[name].case or 'keys'}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)
    if "anyOf" in schema or "oneOf" in schema:
        choices = [type_of(choice, places) for choice in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(choice for choice in choices if choice != "null"))
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}), places)}"
    if kind == "object":
        values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        of = next((type_of(value, places) for value in values if isinstance(value, dict)), "")
        return f"mapping of {of}" if of else "mapping"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(kind, kind or "anything")


def table_of(schema: dict, places: dict[str, Place]) -> list[str]:
    """The keys of a model as the lines of a table."""
    lines = ["", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, value in schema.get("properties", {}).items():
        default = f"`{json.dumps(value['default'], ensure_ascii=False)}`" if value.get("default") is not None else ""
        required = "required" if key in schema.get("required", ()) else ""
        about = " ".join(value.get("description", "").split())
        kind = "by algorithm, as of stages" if key == "defaults" else type_of(value, places)
        cells = (f"`{key}`", kind, required or default, about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def settings_page(name: str) -> str:
    """The page of one schema: its keys, then those of every model in it."""
    schema = json.loads((ROOT / f"config/schema/{name}.schema.json").read_text(encoding="utf-8"))
    places = places_of(schema)
    paths = [place.path for place in places.values()]
    lines = [f"# {SETTINGS[name]}", "", schema.get("description", ""), *table_of(schema, places)]
    for title, place in places.items():
        model = schema["$defs"][title]
        cases = " or ".join(f"`{case}`" for case in place.cases) if paths.count(place.path) > 1 else ""
        heading = f"`{place.path}` with {cases}" if cases else f"`{place.path}`"
        lines += ["", f"## {heading} {{#{title.lower()}}}", "", model.get("description", "")]
        lines += table_of(model, places) if model.get("properties") else ["", type_of(model, places)]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """The page of `stagecoach`: the help of it and of each of its commands."""
    parser = command_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    sections = {"stagecoach": parser} | {f"stagecoach {name}": command for name, command in commands.items()}
    parts = ["# The command `stagecoach`\n\nWhat `stagecoach --help` says, and `--help` of each of its commands.\n"]
    parts += [f"## {name}\n\n```text\n{part.format_help()}```\n" for name, part in sections.items()]
    return "\n".join(parts)


def main() -> None:
    """Write every page."""
    os.environ["COLUMNS"] = "88"  # of the help
    address = repository()
    pages = ROOT / "build/docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "*.yaml", "captions", "__pycache__"))
    for source in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page = source.relative_to(ROOT)
        target = pages / (page.relative_to("docs") if page.is_relative_to("docs") else "index.md")
        text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, address)
        target.write_text(with_links(text, page, address), encoding="utf-8")
    (pages / "reference").mkdir()
    for name in SETTINGS:
        (pages / f"reference/{name}.md").write_text(settings_page(name), encoding="utf-8")
    (pages / "reference/commands.md").write_text(commands_page(), encoding="utf-8")
    print(address)


if __name__ == "__main__":
    main()
