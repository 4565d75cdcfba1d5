"""A stage's first rows as the trainer gets them, by the same functions, without torch."""

from pathlib import Path

from scripts.backends.tokens import load_here, shown_row
from scripts.backends.trl.tokenization import lines_of
from scripts.errors import warn
from scripts.files import read_json
from scripts.recipe.resolve import own_environments
from scripts.records import ShownRow
from scripts.rewards.registry import register
from scripts.rows.chat_format import tokenizer_of
from scripts.stage.stage import Stage


def shown_rows(stage: Stage, count: int) -> list[ShownRow] | str:
    """Return the tokens of the first training rows, or the reason why they cannot be shown.

    UserError where the trainer would refuse the rows or the stage's chat template.
    """
    config, folder = stage.config, stage.parent_export
    register(own_environments(stage.recipe, stage.name), config.environments)
    processor = load_here(folder or config.model, config.chat_template)
    if isinstance(processor, str):
        return processor
    tokenizer = tokenizer_of(processor)
    if config.chat_template is not None:
        from scripts.model.processor import check_template  # noqa: PLC0415

        key = f"{stage.name}: policy.tokenizer.chat_template"
        advice = "name another one, or the right token as model.eos_token"
        check_template(key, tokenizer, key, _ends(folder), advice)
    rows: list[ShownRow] = []
    _, prepare = config.prepare(processor)
    for line in lines_of(stage.train_split):
        rows += [shown_row(line.number, config.parts(row, processor), tokenizer) for row in prepare([line])]
        if len(rows) == count:
            break
    learnt = {token for row in rows for part in row["parts"] if part["is_learnt"] for token in part["ids"]}
    if learnt and not learnt & {tokenizer.eos_token_id, *_ends(folder)}:
        warn(f"{stage.name}: no shown row learns {tokenizer.eos_token!r}, so the model may not learn to end")
    return rows


def _ends(folder: Path | None) -> list[int]:
    settings = folder and folder / "generation_config.json"
    ends = read_json(settings).get("eos_token_id") if settings and settings.exists() else None
    return ends if isinstance(ends, list) else [ends] if ends is not None else []
