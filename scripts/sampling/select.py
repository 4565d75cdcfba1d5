"""Make the rows of a generated blend of its judged responses: demonstrations, preferences, or prompts by pass rate."""

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.data.source_record import describe_file
from scripts.errors import UserError, warn
from scripts.files import open_atomically, sha256_file, sha256_text, write_json
from scripts.program import run_command_line
from scripts.recipe.blend import GeneratedBlend
from scripts.recipe.generated import Best, Pairs
from scripts.recipe.load import load_recipe
from scripts.records import ExportRecord, SampledShard, read_record
from scripts.rows.messages import Row, closing_text, tools_of
from scripts.rows.prompts import PICTURE, prompt_of
from scripts.rows.thoughts import Told, as_message
from scripts.sampling.judge import JUDGED
from scripts.sampling.sample import prompts_in
from scripts.stage.tables import read_table

Response = dict[str, Any]
"""A row of judged.parquet with `pass_rate` and `value`, which orders the responses to a prompt: reward or score."""
LONGER, TIES, FILLS = 1.25, 1 / 3, 0.8
SHOWN_PAIRS, MOST_BINS = 20, 20
UNFINISHED = "responses whose thoughts do not end"
NOT_FINITE = "responses whose reward or score is no finite number"


class Selection:
    """Rows being selected from responses by prompt, with the number of left-out responses or prompts by reason."""

    def __init__(
        self, blend: GeneratedBlend, responses: list[Response], contents: list[str], told: Told = None
    ) -> None:
        """`told` marks the models' thoughts, which stay in the rows."""
        self.select, self.seed, self.contents, self.told = blend.select, blend.seed, contents, told
        self.models, self.sampled_by = blend.source.models, blend.source.seed
        self.responses_each = blend.source.samples * len(self.models)
        self.left_out: Counter[str] = Counter()
        self.by_line: dict[int, list[Response]] = defaultdict(list)
        for response in self._judged(responses):
            self.by_line[response["line"]].append(response)
        self.rates = {line: each[0]["pass_rate"] for line, each in self.by_line.items()}
        self.lengths: list[tuple[int, int]] = []

    def _judged(self, responses: list[Response]) -> Iterator[Response]:
        passes = defaultdict(list)
        least = self.select.pass_rate.reward if self.select.pass_rate else 1.0
        for each in responses:
            if each["reward"] is not None and math.isfinite(each["reward"]):
                passes[each["line"]].append(each["reward"] >= least)
        rates = {line: fmean(passed) for line, passed in passes.items()}
        for each in responses:
            value = each["score" if self.select.rank else "reward"]
            if value is not None and not math.isfinite(value):
                self.left_out[NOT_FINITE] += 1
            elif value is not None:
                yield each | {"pass_rate": rates.get(each["line"]), "value": value}
            elif each.get("unfinished"):
                self.left_out[UNFINISHED] += 1
            else:
                why = "that could not be judged" if each["why"] else "to prompts without an environment"
                self.left_out[f"responses {why}"] += 1

    def chosen(self) -> Iterator[tuple[int, list[Response]]]:
        """Yield the lines of the prompts within the pass rates, with the responses that meet the filter."""
        bounds, kept = self.select.pass_rate, self._filtered()
        for line, responses in self.by_line.items():
            rate = self.rates[line]
            if bounds and not (rate is not None and bounds.min <= rate <= bounds.max):
                self.left_out[f"prompts of a pass rate beyond {bounds.min:g} to {bounds.max:g}"] += 1
                continue
            left = [each for each in responses if kept is None or (line, each["model"], each["sample"]) in kept]
            self.left_out["responses that do not meet the filter"] += len(responses) - len(left)
            yield line, left

    def _filtered(self) -> set[tuple[int, int, int]] | None:
        """Return line, model and sample of the responses that meet the filter; None without one."""
        if not self.select.filter:
            return None
        responses = [each for several in self.by_line.values() for each in several]
        named = [each | {"model": self.models[each["model"]], "place": at} for at, each in enumerate(responses)]
        try:
            kept = pa.Table.from_pylist(named).filter(pq.filters_to_expression(self.select.filter))
        except (pa.ArrowException, TypeError) as error:
            raise UserError(f"select.filter: {error}") from None
        return {tuple(responses[at][key] for key in ("line", "model", "sample")) for at in kept["place"].to_pylist()}

    def made(self, response: Response) -> dict[str, Any]:
        """Return where a response is from: the content of the checkpoint, and what was sampled and judged."""
        facts = {name: response[name] for name in ("sample", "environment", "reward", "score", "tokens")}
        facts = {name: value for name, value in facts.items() if value is not None}
        return {"model": self.contents[response["model"]], "line": response["line"], "seed": self.sampled_by, **facts}

    def demonstrations(self, prompts: dict[int, Row]) -> Iterator[Row]:
        """Yield the best responses to each prompt, as conversations."""
        for line, responses in self.chosen():
            for response in self._best(responses, self.select.best):
                row = prompts[line]
                messages = [*prompt_of(row), as_message(response["response"], self.told)]
                agent = {"agent_ref": row["agent_ref"]} if "agent_ref" in row else {}
                yield {**agent, "messages": messages, **_tools(row), "made": self.made(response)}

    def _best(self, responses: list[Response], asked: Best) -> list[Response]:
        able = self._able(responses)
        good = [each for each in able if asked.min_reward is None or each["value"] >= asked.min_reward]
        self.left_out[f"responses below {asked.min_reward}"] += len(able) - len(good)
        good.sort(key=lambda each: (-each["value"], each["tokens"] if asked.shortest else 0))
        taken, texts, by_model = list[Response](), set[str](), Counter[int]()
        for each in good:
            has_room = by_model[each["model"]] < asked.keep and len(taken) < (asked.per_prompt or len(good))
            if has_room and each["response"] not in texts:
                taken.append(each)
                by_model[each["model"]] += 1
                texts.add(each["response"])
        self.left_out["responses beside a better or an equal one"] += len(good) - len(taken)
        self.left_out["prompts without a response that is good enough"] += not taken
        return taken

    def _able(self, responses: list[Response]) -> list[Response]:
        """Return the responses that can be imitated: whole ones with a text, whose thoughts end."""
        whole = [each for each in responses if not each["cut"] and each["response"].strip()]
        able = [each for each in whole if not each.get("unfinished")]
        self.left_out["responses that are cut or empty"] += len(responses) - len(whole)
        self.left_out[UNFINISHED] += len(whole) - len(able)
        return able

    def preferences(self, prompts: dict[int, Row]) -> Iterator[Row]:
        """Yield a pair of responses to each prompt where one is better by the margin."""
        for line, responses in self.chosen():
            able = self._able(responses)
            if (pair := self._pair(line, able, responses, self.select.pairs)) is None:
                continue
            better, worse = pair
            self.lengths.append((better["tokens"], worse["tokens"]))
            row, made = prompts[line], {"chosen": self.made(better), "rejected": self.made(worse)}
            answers = {
                name: [as_message(each["response"], self.told)]
                for name, each in (("chosen", better), ("rejected", worse))
            }
            yield {"prompt": prompt_of(row), **answers, **_tools(row), "made": made}

    def _pair(
        self, line: int, able: list[Response], responses: list[Response], asked: Pairs
    ) -> tuple[Response, Response] | None:
        better = max(able, key=lambda each: each["value"], default=None)
        worse = [
            each
            for each in responses
            if better and each["value"] <= better["value"] - asked.margin and each["response"].strip()
        ]
        if not worse:
            why = "prompts whose responses are all alike" if better else "prompts without a whole response"
            self.left_out[why] += 1
            return None
        if asked.rejected == "worst":
            rejected = min(worse, key=lambda each: each["value"])
        elif asked.rejected == "random":
            rejected = random.Random(f"{self.seed} {line}").choice(worse)
        else:
            rejected = min(worse, key=lambda each: abs(each["tokens"] - better["tokens"]))
        short, long = sorted((better["tokens"], rejected["tokens"]))
        if asked.max_length_ratio is not None and long > asked.max_length_ratio * max(short, 1):
            self.left_out[f"pairs of which one is longer than {asked.max_length_ratio:g} times the other"] += 1
            return None
        return better, rejected

    def prompts(self, prompts: dict[int, Row]) -> Iterator[Row]:
        """Yield the prompts within the pass rates, in the curriculum's order."""
        lines = [line for line, responses in self.chosen() if responses]
        for line in _ordered(lines, self.rates, self.select.curriculum, self.seed):
            first = self.by_line[line][0]
            made = {"models": sorted({self.contents[each["model"]] for each in self.by_line[line]}), "line": line}
            yield {**prompts[line], "pass_rate": first["pass_rate"], "made": made}


def _tools(row: Row) -> dict[str, Any]:
    """Return the tools of a row of prompts as the field of a row."""
    tools = tools_of(row)
    return {"tools": tools} if tools else {}


def _ordered(lines: list[int], rates: dict[int, float | None], curriculum: Any, seed: int) -> list[int]:
    """Return lines in the order of a curriculum: the easiest first, or bands with shares; None: as they stand."""
    if curriculum is None:
        return lines
    if curriculum == "by_pass_rate":
        return sorted(lines, key=lambda line: -(rates[line] or 0.0))
    rated = [line for line in lines if rates[line] is not None]
    banded = [[line for line in rated if band.min <= rates[line] <= band.max] for band in curriculum]
    rows = min(len(found) / band.share for band, found in zip(curriculum, banded, strict=True))
    ordered, taken = list[int](), set[int]()
    for band, found in zip(curriculum, banded, strict=True):
        left = sorted({*found} - taken)
        drawn = {*random.Random(seed).sample(left, min(len(left), round(rows * band.share)))}
        ordered += [line for line in lines if line in drawn]
        taken |= drawn
    return ordered


def _shown(rows: list[Row], seed: int) -> list[dict[str, Any]]:
    """Return some rows to read, drawn by the seed."""
    drawn = random.Random(seed).sample(range(len(rows)), min(SHOWN_PAIRS, len(rows)))
    shown = []
    for row in (rows[place] for place in sorted(drawn)):
        if "chosen" in row:
            asked, answers = row["prompt"], [row[name][-1]["content"] for name in ("chosen", "rejected")]
        elif "messages" in row:
            asked, answers = row["messages"][:-1], [row["messages"][-1]["content"]]
        else:
            asked, answers = prompt_of(row), []
        prompt = closing_text(asked, PICTURE)
        shown.append({"prompt": prompt, "answers": answers, "pass_rate": row.get("pass_rate"), "made": row["made"]})
    return shown


def described(selection: Selection, rows: list[Row], environments: Counter[str]) -> dict[str, Any]:
    """Return what the page of the blend shows: pass rates, lengths, left-out rows, warnings and rows to read."""
    rates, bins = dict[str, list[int]](), min(MOST_BINS, selection.responses_each)
    for line, responses in selection.by_line.items():
        if (rate := selection.rates[line]) is not None:
            counts = rates.setdefault(responses[0]["environment"] or "none", [0] * (bins + 1))
            counts[round(rate * bins)] += 1
    lengths, warnings = selection.lengths, []
    longer = None
    if lengths:
        chosen, rejected = fmean(a for a, _ in lengths), fmean(b for _, b in lengths)
        longer = sum((a > b) + (a == b) / 2 for a, b in lengths) / len(lengths)
        if chosen > LONGER * rejected:
            warnings.append(
                f"chosen responses are {chosen / max(rejected, 1e-9) - 1:.0%} longer than rejected ones, so DPO learns "
                "length; say max_length_ratio, or rejected: nearest_length"
            )
    alike = selection.left_out["prompts whose responses are all alike"]
    if selection.select.pairs and alike > TIES * max(len(selection.by_line), 1):
        warnings.append(f"{alike} of {len(selection.by_line)} prompts have no better and worse response")
    name, most = max(environments.items(), key=lambda item: item[1], default=("", 0))
    asked = {each["environment"] for several in selection.by_line.values() for each in several}
    if len(asked) > 1 and most > FILLS * len(rows):
        warnings.append(f"{name} has {most} of the {len(rows)} rows")
    return {
        "rows": len(rows),
        "prompts": len(selection.by_line),
        "environments": dict(sorted(environments.items())),
        "pass_rates": dict(sorted(rates.items())),
        "lengths": lengths,
        "longer_chosen": longer,
        "left_out": {why: count for why, count in selection.left_out.items() if count},
        "warnings": warnings,
        "shown": _shown(rows, selection.seed),
    }


def main(
    recipe: Path,
    blend: Annotated[str, "the generated blend"],
    prompts: Annotated[Path, "the training split of the prompts"],
    judged: Annotated[Path, "judged.parquet"],
    sampled: Annotated[list[Path], "the JSON files beside the responses"],
    makers: Annotated[list[Path], "hf/record.json of each model that made or ranked the responses"],
    output: Annotated[Path, "folder for <blend>.jsonl, record.json and selection.json"],
) -> None:
    """Write the rows of a generated blend, their record as of a source, and what the blend's page shows."""
    loaded = load_recipe(recipe)
    made, source, told = loaded.generated[blend], loaded.generated[blend].source, loaded.model.thoughts
    records = [read_record(path, ExportRecord) for path in makers]
    contents = {name: record["content"] for name, record in zip(made.makers, records, strict=True)}
    selection = Selection(
        made, read_table(judged, JUDGED).to_pylist(), [contents[name] for name in source.models], told
    )
    asked = {
        prompt.line: prompt.row
        for prompt in prompts_in(prompts, loaded.blends[source.prompts].kind)
        if prompt.line in selection.by_line
    }
    rows = list(getattr(selection, made.kind)(asked))
    first = read_record(sampled[0], SampledShard)
    selection.left_out.update(first["left_out"])
    if not rows:
        why = ", ".join(f"{count} {what}" for what, count in selection.left_out.items() if count)
        raise UserError(f"blends.{blend}: no row is left of {first['prompts']} prompts ({why}); mend select")
    of_lines = {line: several[0]["environment"] or "none" for line, several in selection.by_line.items()}
    environments = Counter(of_lines[(row["made"].get("chosen") or row["made"])["line"]] for row in rows)
    shown = described(selection, rows, environments)
    shown["prompts_sha256"] = sha256_file(prompts)
    shown["sampling"] = {key: first[key] for key in ("decoding", "not_used") if key in first}
    for words in shown["warnings"]:
        warn(f"{blend}: {words}")
    path = output / f"{blend}.jsonl"
    with open_atomically(path) as (file,):
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    generated = {
        "by": contents,
        "prompts": source.prompts,
        "samples": source.samples,
        **{key: shown[key] for key in ("rows", "left_out", "longer_chosen")},
        "asked": first["prompts"],
    }
    revision = sha256_text("".join(contents.values()))[:16] if len(contents) > 1 else next(iter(contents.values()))
    origin = {"source": f"generated by {', '.join(made.makers)}", "revision": revision, "generated": generated}
    write_json(output / "selection.json", shown)
    write_json(output / "record.json", {"blends": {blend: origin}, "files": {path.name: describe_file(path)}})


if __name__ == "__main__":
    run_command_line(main)
