"""Write the model card of a published stage in Hugging Face's format, from the run's records alone."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from scripts.errors import UserError, printable
from scripts.files import sha256_text, write_text
from scripts.model.hugging_face import config_of, tensors_of
from scripts.program import run_command_line
from scripts.recipe.resolve import config_text, training_config
from scripts.recipe.yaml_file import leaves
from scripts.records import Benchmarks, Evaluation, Gate, Manifest, Record, read_if_there
from scripts.report.chain import Link, chain_text, read_chain
from scripts.report.scores import selection_sentences
from scripts.rows.chat_format import ChatFormat
from scripts.stage.again import words_of_again
from scripts.stage.amendment import words_of_amendments
from scripts.stage.provenance import step_text, words_of_skipped
from scripts.stage.publish import code_among
from scripts.stage.tables import ROLLOUTS, read_table

TEMPLATE = Path(__file__).with_name("card.md.jinja")
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "`": "&#96;", "://": "&#58;//", "www.": "www&#46;", "@": "&#64;"}
"""What a page shows as it stands in place of a sign that begins HTML, code, or an address; the first comes first."""
MARKUP = re.compile(r"[\\|\[\]*~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")
"""A sign that is markup where it stands; an underscore within a word is none."""
NUMBERED = re.compile(r"^(\d+)([.)])")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FOLDER, NO_ROWS = "folder", {"train": {}, "validation": {}}


def model_card(
    hf: Path, license_id: str | None = None, base_model: str | None = None, attribution: str | None = None
) -> ModelCard:
    """Return an export's card; `license_id` and `base_model` are of the hub's, or none is stated.

    UserError where the stage, its export or its held-out scores are not of one checkpoint.
    """
    chain = read_chain(hf)
    link = chain[-1]
    if link.exported is None:
        folder = link.paths.directory / "hf"
        raise UserError(f"{folder}: no export of the published checkpoint; snakemake {folder}")
    kinds = {link.paths.evaluation: Evaluation, link.paths.test: Evaluation, link.paths.benchmarks: Benchmarks}
    measured, test, benchmarks = (_of_export(link, path, kind) for path, kind in kinds.items())
    evaluation = measured if measured and "environments" in measured else None
    results = [*_results(evaluation, "validation"), *_results(test, "test"), *_benchmark_results(benchmarks)]
    card = ModelCard.from_template(
        _metadata(chain, results, license_id, base_model),
        plain=markdown_text,
        attribution=attribution,
        rows_seen=_rows_seen,
        scored=read_table(link.paths.rollouts, ROLLOUTS)["split"].value_counts().to_pylist() if evaluation else [],
        template_path=str(TEMPLATE),
        name=f"{link.run_name}-{link.name}",
        stage=link.name,
        step=link.record["step"],
        blends=[
            (each, read_if_there(each.blend / "manifest.json", Manifest) or NO_ROWS) for each in chain if each.blend
        ],
        links=chain,
        step_text=step_text,
        model=_model(link.paths.export) | {"code": code_among(link.exported["files"])},
        configs=[(each.name, config_text(each.settings)) for each in chain if each.settings],
        evaluation=evaluation,
        validation=(measured or {}).get("validation"),
        selection=selection_sentences(link.paths.directory.parent, [each.paths.name for each in chain]),
        benchmarks=benchmarks,
        gate=read_if_there(link.paths.gate, Gate),
        is_traced=all(
            span["code"] is not None and span["code"]["dirty"] is False
            for each in chain
            for span in each.record.get("trained_by", ())
        ),
        words_of_skipped=words_of_skipped,
        words_of_again=words_of_again,
        words_of_amendments=words_of_amendments,
        lineage=chain_text(chain),
    )
    return ModelCard(_without_folders(str(card), chain))  # read again: metadata, model index and all


def markdown_text(text: object) -> str:
    """Return a text that Markdown shows as it stands, on one line: no markup, HTML or address of it works."""
    shown = printable(str(text).replace("\r", " ").replace("\n", " ").replace("\t", " "))
    for sign, entity in ENTITIES.items():
        shown = shown.replace(sign, entity)
    escaped = MARKUP.sub(r"\\\g<0>", shown)
    return NUMBERED.sub(r"\1\\\2", escaped)


def _without_folders(text: str, chain: list[Link]) -> str:
    """Return the text with every recorded path cut to the last name."""
    values = [value for link in chain for _, value in leaves({**link.record, "config": link.settings or {}})]
    values += [name for name, _ in _sources(chain)]
    paths = {value for value in values if isinstance(value, str) and value.startswith(("/", "./"))}
    for path in sorted(paths, key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _of_export(link: Link, path: Path, kind: type[Record]) -> Record | None:
    """Return a record of scores; UserError for another export's scores."""
    scores = read_if_there(path, kind)
    if scores and scores.get("content") != link.exported["content"]:
        raise UserError(f"{path}: scores another export than {link.paths.directory / 'hf'}; snakemake {path}")
    return scores


def _rows_seen(link: Link, manifest: Manifest) -> int | None:
    """Return the distinct training rows that the steps read at most; all rows where the trained config is gone."""
    rows = manifest["train"].get("rows")
    try:
        return min(rows or 0, link.record["step"] * training_config(link.settings).rows_per_step) or rows
    except (KeyError, TypeError, ValueError):  # a config of an earlier commit
        return rows


def _metadata(
    chain: list[Link], results: list[EvalResult], license_id: str | None, base_model: str | None
) -> ModelCardData:
    """Return the card's YAML; only hub ids become datasets and base models."""
    configs = [link.settings for link in chain if link.settings]
    named = {name for name, revision in _sources(chain) if revision != FOLDER}
    datasets = sorted(filter(HUB_ID.fullmatch, named))
    base = [config["model"]["name"] for config in configs if "name" in config.get("model", {})]
    base += [link.record["model"]["name"] for link in chain if "model" in link.record]
    tags = dict.fromkeys(["stagecoach", *(config["algorithm"] for config in configs)])
    return ModelCardData(
        license=license_id,
        library_name="transformers",
        pipeline_tag="text-classification" if chain[-1].settings.get("algorithm") == "reward" else "text-generation",
        base_model=base_model or next(filter(HUB_ID.fullmatch, base), None),
        datasets=datasets or None,
        tags=list(tags),
        model_name=f"{chain[-1].run_name}-{chain[-1].name}" if results else None,
        eval_results=results or None,
    )


def _sources(chain: list[Link]) -> Iterator[tuple[str, str]]:
    """Yield name and revision of each recorded source."""
    for link in chain:
        if (data := link.record.get("data")) and (source := data["source"]):
            yield from zip(source["name"].split(", "), source["revision"].split(", "), strict=False)


def _results(evaluation: Evaluation | None, split: str) -> Iterator[EvalResult]:
    for name, entry in (evaluation or {}).get("environments", {}).items():
        yield EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=f"held-out rows of {name}",
            dataset_split=split,
            metric_type="mean_reward",
            metric_name="mean reward, 0 to 1",
            metric_value=entry["after"],
        )


def _benchmark_results(benchmarks: Benchmarks | None) -> Iterator[EvalResult]:
    for name, entry in benchmarks["benchmarks"].items() if benchmarks else ():
        dataset, metric = entry.get("dataset", {}), entry.get("metric", "score")
        yield EvalResult(
            task_type="text-generation",
            dataset_type=dataset["path"] if HUB_ID.fullmatch(dataset.get("path", "")) else name,
            dataset_name=name,
            dataset_config=dataset.get("name"),
            dataset_split=dataset.get("split"),
            metric_type=metric.split(",")[0],
            metric_name=f"{name}: {metric}",  # the hub joins the results on one data set
            metric_value=entry["score"],
            metric_args={key: entry[key] for key in ("stderr", "num_fewshot", "version") if entry.get(key) is not None},
        )


def _model(folder: Path) -> dict[str, Any]:
    """Return the size and kind of the exported model, and the chat template, if any, and tokens in words."""
    config, tensors, found, chat = config_of(folder), tensors_of(folder), ChatFormat.of(folder), ""
    if found.chat_template is not None:
        tokens = ", ".join(f"{name} {value!r}" for name, value in found.tokens.items() if value is not None)
        chat = f"chat template of SHA-256 {sha256_text(found.chat_template)[:16]}; {tokens}"
    return {
        "parameters": sum(math.prod(shape) for _, shape in tensors.values()),
        "types": sorted({dtype for dtype, _ in tensors.values()}),
        "architecture": ", ".join(config.get("architectures") or [config.get("model_type", "unknown")]),
        "context": config.get("max_position_embeddings"),
        "chat": chat,
    }


def main(
    export: Annotated[Path, "such as results/rlhf/hf"],
    output: Annotated[Path, "such as README.md"],
    license: Annotated[str | None, "by the hub's name, such as apache-2.0; none: the card states none"] = None,
    base_model: Annotated[str | None, "the hub's name of the base model, where that is a folder"] = None,
    attribution: Annotated[str | None, "a sentence on the makers and licence of the base model"] = None,
) -> None:
    """Write the model card."""
    write_text(output, str(model_card(export, license, base_model, attribution)))


if __name__ == "__main__":
    run_command_line(main)
