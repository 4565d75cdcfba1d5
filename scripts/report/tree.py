"""A chain as a tree of text."""

from collections.abc import Iterator
from typing import Any

from scripts.errors import shortened
from scripts.report.chain import Link
from scripts.stage.provenance import step_text, words_of_skipped

LONGEST_NAME = 80


def chain_text(chain: list[Link]) -> str:
    """Return the line of a chain's checkpoint, the facts of the training, and the ancestors below."""
    return "\n".join(_lines(chain[-1], {link.name: link for link in chain}))


def _lines(link: Link, links: dict[str, Link]) -> Iterator[str]:
    record = link.record
    yield f"{link.name}  step {step_text(record)}  identity {record['identity']}  content {link.content or '-'}"
    branches = [[f"{head:<7} {words}"] for head, words in facts_of(link)]
    roles = {start["stage"]: role for role, start in record.get("roles", {}).items()}
    for name in link.parents:
        head, *below = _lines(links[name], links)
        branches.append([f"{roles[name]}: {head}" if name in roles else head, *below])
    for place, branch in enumerate(branches):
        is_last = place == len(branches) - 1
        yield f"{'└─' if is_last else '├─'} {branch[0]}"
        for line in branch[1:]:
            yield f"{'  ' if is_last else '│ '} {line}"


def facts_of(link: Link) -> Iterator[tuple[str, str]]:
    """Yield the facts of a training: a heading and the words."""
    record = link.record
    if "facts" in record:
        yield "config", f"sha256 {record['facts']['config'][:16]}"
    if record.get("seed") is not None:
        yield "seed", str(record["seed"])
    if template := record.get("chat_template"):
        yield "chat", f"template {shortened(template['name'], LONGEST_NAME)}  sha256 {template['sha256'][:16]}"
    if record.get("release"):
        yield "release", " ".join(f"{name} {version}" for name, version in sorted(record["release"].items()))
    if (data := record.get("data")) and (facts := record.get("facts")):
        splits = f"train {facts['train_split'][:16]}, validation {facts['validation_split'][:16]}"
        source = data["source"]
        dataset = f"{source['name']}@{source['revision']}" if source else "an unrecorded source"
        yield "data", f"{data['blend']} of {dataset}; {splits}; manifest {data['manifest'][:16]}"
        if "data_ended" in record:
            yield "ended", words_of_skipped(record)
        for name, revision in data["tables"].items():
            yield "table", f"{name}@{revision or 'unknown'}"
    for span in record.get("trained_by", ()):
        first, last = span["steps"]
        yield "code", f"{code_name(span['code'])} (steps {first} to {last})"
        if span["image"]:
            yield "image", f"{image_name(span['image'])} (steps {first} to {last})"
    for role, model in record.get("models", {}).items():
        yield "model", f"{role}: {model['name']}@{model['revision'] or 'unknown'}  content {model['content']}"
    if not record.get("parents"):
        content = (record.get("model") or {}).get("content")
        yield "model", model_name(link) + (f"  content {content}" if content else "")


def code_name(code: dict[str, Any] | None) -> str:
    """Return a revision of Stagecoach in words."""
    if code is None:
        return "not recorded"
    scripts = f"scripts {code['scripts'][:16]}"
    revision = code["commit"] or code.get("version")
    if revision is None:
        return f"no git; {scripts}"
    return f"{revision[:12]}, changed since: {scripts}" if code["dirty"] else revision


def image_name(image: dict[str, Any]) -> str:
    """Return a container image with the digest or hash, if known."""
    if image["digest"]:
        return f"{image['name'].partition('@')[0]}@{image['digest']}"
    return f"{image['name']} (sha256 {image['sha256'][:16]})" if image["sha256"] else f"{image['name']} (no digest)"


def model_name(link: Link) -> str:
    """Return the name of a first stage's model."""
    model = link.record.get("model") or (link.settings or {}).get("model")
    if model is None:
        return "not recorded"
    revision = f"@{model['revision']}" if model.get("revision") else ""
    return f"{model['name']}{revision}" if "name" in model else "from scratch, of the shape that the config gives"
