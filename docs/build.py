"""Make the pages of the site in build/docs: docs/, README.md as its index, and the reference.

    python -m docs.build

What the reference says comes from config/schema and from the parser of `stagecoach`. A link that leaves docs/ becomes
one to the repository, or, to README.md, to the index. `make docs` builds the site of them.
"""

import argparse
import json
import os
import re
import shutil
from pathlib import Path

import yaml

from scripts.commands.arguments import command_parser

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SETTINGS = {
    "recipe": "Keys of a recipe: `config/recipes/*.yaml`",
    "site": "Keys of a site: `config/sites/*.yaml`",
    "config": "Keys of `config/config.yaml`, and of `--config`",
}


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


def type_of(schema: dict) -> str:
    """What a value may be, in Markdown; a model is a link to its table."""
    kind = schema.get("type")
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)
    if "anyOf" in schema or "oneOf" in schema:
        choices = [type_of(choice) for choice in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(choice for choice in choices if choice != "null"))
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if kind == "object":
        values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        of = next((type_of(value) for value in values if isinstance(value, dict)), "")
        return f"mapping of {of}" if of else "mapping"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(kind, kind or "anything")


def table_of(schema: dict) -> list[str]:
    """The keys of a model as the lines of a table."""
    lines = ["", "| key | value | default | what |", "| --- | --- | --- | --- |"]
    for key, value in schema.get("properties", {}).items():
        default = f"`{json.dumps(value['default'], ensure_ascii=False)}`" if value.get("default") is not None else ""
        needed = "needed" if key in schema.get("required", ()) else ""
        about = " ".join(value.get("description", "").split())
        kind = "by algorithm, as of stages" if key == "defaults" else type_of(value)
        cells = (f"`{key}`", kind, needed or default, about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def settings_page(name: str) -> str:
    """The page of one schema: its keys, then those of every model in it."""
    schema = json.loads((ROOT / f"config/schema/{name}.schema.json").read_text(encoding="utf-8"))
    lines = [f"# {SETTINGS[name]}", "", schema.get("description", ""), *table_of(schema)]
    for title, model in schema.get("$defs", {}).items():
        lines += ["", f"## {title}", "", model.get("description", "")]
        lines += table_of(model) if model.get("properties") else ["", type_of(model)]
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
    repository = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["extra"]["repository"]
    pages = ROOT / "build/docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "*.yaml", "captions", "__pycache__"))
    for source in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page = source.relative_to(ROOT)
        target = pages / (page.relative_to("docs") if page.is_relative_to("docs") else "index.md")
        target.write_text(with_links(source.read_text(encoding="utf-8"), page, repository), encoding="utf-8")
    (pages / "reference").mkdir()
    for name in SETTINGS:
        (pages / f"reference/{name}.md").write_text(settings_page(name), encoding="utf-8")
    (pages / "reference/commands.md").write_text(commands_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
