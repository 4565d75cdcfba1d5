"""A stage's model card tells what its records tell; a push brings exactly the recorded export and the card to the hub."""

import html
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from scripts.commands.push import push as push_link
from scripts.commands.push import verified_link
from scripts.errors import UserError
from scripts.files import read_json, sha256_file, write_json
from scripts.recipe.load import load_recipe
from scripts.report.card import markdown_text, model_card
from scripts.stage.consistency import exported_model
from scripts.stage.publish import export_name
from tests import programs
from tests.conftest import SHORT, refusal
from tests.hub import Fault, Hub, turn_client

WRITER, READER = "hf_mayWrite0123456789", "hf_mayRead0123456789"


# --- the card ---


def test_the_cards_metadata_is_read_back_by_the_hubs_client_with_every_score(made):
    card = ModelCard(str(model_card(made / "rlvr1/hf", "apache-2.0")))
    metadata = card.data.to_dict()
    assert (metadata["license"], metadata["library_name"], metadata["tags"]) == ("apache-2.0", "transformers", ["stagecoach", "sft", "grpo"])  # fmt: skip
    assert card.data.model_name == "short-rlvr1" and "base_model" not in metadata and "datasets" not in metadata
    assert {result.dataset_type: result.metric_value for result in card.data.eval_results} == {
        "math": 0.6,
        "genrm": 0.4,
    }


def test_the_card_shows_data_stages_parameters_scores_limits_and_lineage(made):
    text = model_card(made / "rlvr1/hf").text
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["Data", "Stages", "Parameters", "Scores", "Limits", "Lineage"]
    assert (
        "| rlvr1 | rlvr1 | synthetic | synthetic-0 |" in text and "| 12 | 20 |" in text
    )  # three steps of four prompts
    assert "rows of blend rows (30 rows), before and after stage `rlvr1`" in text
    assert "| sft | fresh weights | sft | 3 | 3 |" in text and "| rlvr1 | sft | grpo | 3 | 3 |" in text
    assert "320 parameters (F32)" in text and "num_generations_per_prompt: 4" in text
    assert "| math | 20 | 0.500 | 0.600 | +0.100 (" in text and "| mean of the environments | | 0.500 | 0.500 |" in text
    assert "- genrm scores lower after the last stage (0.500 to 0.400)." in text
    assert "- The last stage did not meet all its success criteria: warn." in text
    assert "└─ sft  step 3  identity" in text


def test_a_recipe_names_a_folders_base_model_and_its_makers(made, tmp_path):
    path, said = (
        tmp_path / "recipe.yaml",
        {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "attribution": "By HF."},
    )
    text = yaml.safe_load(SHORT.read_text()) | {"license": "apache-2.0", "model": {"name": "/models/smollm2"} | said}
    path.write_text(yaml.safe_dump(text))
    recipe = load_recipe(path)
    assert recipe.card_facts == {"license": "apache-2.0"} | said
    assert recipe.model.model_dump().keys().isdisjoint(said), "so neither changes what is trained"
    card = model_card(made / "rlvr1/hf", "apache-2.0", **said)
    assert card.data.base_model == said["base_model"] and "By HF." in card.text


def test_hub_names_become_metadata_and_paths_of_this_machine_never_get_into_the_card(chain):
    record = read_json(chain / "rlvr1/ckpt/record.json")
    record["data"]["source"] = {"name": "org/blends, /home/me/more, org/math", "revision": f"{'a' * 40}, folder, main"}
    write_json(chain / "rlvr1/ckpt/record.json", record)
    record = read_json(chain / "sft/ckpt/record.json")
    record["data"]["source"] = {"name": "/home/me/rows", "revision": "folder"}
    record["model"] = {"name": "/home/me/qwen", "revision": None, "content": "3" * 16}
    write_json(chain / "sft/ckpt/record.json", record)
    config = chain / "sft/run/config.yaml"
    config.write_text(config.read_text() + "aside: {name: /home/me/model}\n")
    card = model_card(chain / "rlvr1/hf")
    assert card.data.datasets == ["org/blends", "org/math"]
    assert "/home/me" not in str(card) and "rows (a folder)" in card.text and "name: model" in card.text
    assert "─ model   qwen" in card.text and card.data.base_model is None


def test_no_name_breaks_a_table_or_adds_a_tag_or_link(chain):
    evil = "a | b <img src=x onerror=alert(1)> [c](https://example.org) `d`\n# e"
    record = read_json(chain / "rlvr1/ckpt/record.json")
    record["data"]["source"] = {"name": evil, "revision": evil}
    record["data"]["tables"] = {evil: evil}
    write_json(chain / "rlvr1/ckpt/record.json", record)
    evaluation = read_json(chain / "rlvr1/eval.json")
    evaluation["environments"] = {evil: evaluation["environments"]["genrm"]}
    write_json(chain / "rlvr1/eval.json", evaluation)
    settings = read_json(chain / "rlvr1/hf/model/config.json")
    (chain / "rlvr1/hf/model/config.json").unlink()
    write_json(chain / "rlvr1/hf/model/config.json", settings | {"architectures": [evil, "```\n<script>"]})
    text = model_card(chain / "rlvr1/hf").text
    tables, _, lineage = text.partition("## Lineage")
    assert "onerror" in tables and not re.search(r"<(img|script)|(?<!\\)\[c\]|^# e", tables, re.MULTILINE)
    assert lineage.count("```") == 2
    rows = [line for line in tables.splitlines() if line.startswith("| rlvr1 |") or line.startswith("| a ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6, 8} and len(rows) == 3


@pytest.mark.parametrize(
    "text",
    [
        "**bold** _leant_ ~~gone~~ *a* __b__",
        "![picture](https://example.org/x.png) [link][ref] <https://example.org>",
        "see https://example.org and www.example.org, @somebody",
        "&lt;b&gt; &amp; <b>",
        "`code` ``more``",
        "# title",
        "- item",
        "1. item",
        "2) item",
        "+ item",
        "===",
        "back\\slash \\* \\[",
        "math_with_judge_simple_agent, 3 > 2, a|b",
    ],
)
def test_markdown_shows_a_text_as_it_stands(text):
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    shown = markdown.render(markdown_text(text))
    assert re.fullmatch(r"<p>[^<]*</p>\n", shown), shown
    assert html.unescape(shown[3:-5]) == text
    addresses = re.findall(r"https?://|www\.", markdown_text(text))
    assert not addresses, "which the hub would make links of"


def test_a_card_of_scores_of_another_export_is_refused_and_one_without_scores_says_so(chain):
    evaluation = read_json(chain / "rlvr1/eval.json")
    write_json(chain / "rlvr1/eval.json", evaluation | {"content": "0" * 16})
    with pytest.raises(UserError, match=r"eval.json: scores another export than .*; snakemake .*eval.json"):
        model_card(chain / "rlvr1/hf")
    (chain / "rlvr1/eval.json").unlink()
    card = model_card(chain / "rlvr1/hf")
    assert "- No held-out scores were taken." in card.text and card.data.eval_results is None


def test_the_chat_template_that_a_stage_names_is_told_by_card_and_lineage(chain):
    (chain / "rlvr1/hf/model").resolve().joinpath("chat_template.jinja").write_text("{{ messages }}")
    record = read_json(chain / "rlvr1/ckpt/record.json")
    named = {"name": "qwen3_training", "sha256": "a" * 64}
    write_json(chain / "rlvr1/ckpt/record.json", record | {"chat_template": named})
    text = model_card(chain / "rlvr1/hf").text
    assert "Stage `rlvr1` trained with the chat template `qwen3_training` (SHA-256 aaaaaaaaaaaaaaaa)." in text
    assert "chat    template qwen3_training  sha256 aaaaaaaaaaaaaaaa\n" in text
    assert "as its files say: chat template of SHA-256 " in text


# --- the push ---


@pytest.fixture
def hub():
    with Hub() as running:
        running.tokens |= {WRITER: True, READER: True}
        running.writers.add(WRITER)
        yield running


@pytest.fixture
def push(hub, chain, tmp_path, monkeypatch):
    """Run the program against the hub; all it prints."""
    turn_client(monkeypatch, hub.url, tmp_path / "home")

    def run(*options: str, token: str | None = WRITER) -> subprocess.CompletedProcess:
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        command = ("scripts.commands.__main__", "push", chain / "rlvr1/hf", "--repository", "org/model")
        done = programs.run(*command, *options)
        done.stdout += done.stderr
        assert WRITER not in done.stdout and READER not in done.stdout and "Traceback" not in done.stdout
        return done

    return run


def test_a_push_brings_the_recorded_files_and_the_card_in_one_commit_to_a_private_repository(hub, push, chain):
    facts = {"license": None, "base_model": "org/base", "attribution": "By Org."}
    write_json(chain / "settings/card.json", facts)
    done = push("--license", "mit")
    assert done.returncode == 0, done.stdout
    repository, exported = hub.repositories["org/model"], read_json(chain / "rlvr1/hf/record.json")
    head = repository.branches["main"]
    assert done.stdout.strip() == f"{hub.url}/org/model/commit/{head}" and repository.private
    files = repository.commits[head]
    assert files.keys() == {*exported["files"], "README.md"} and len(repository.commits) == 2
    for name in exported["files"]:
        assert files[name] == (chain / "rlvr1/hf/model" / name).read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("mit", "org/base") and "By Org." in card.text
    assert sha256_file(chain / "rlvr1/hf/model/model.safetensors") in hub.stored  # by git LFS


def test_pushed_again_no_large_file_is_sent_twice(hub, push):
    push("--public")
    assert not hub.repositories["org/model"].private
    sent = len(hub.asked(method="PUT"))
    assert push().returncode == 0 and len(hub.asked(method="PUT")) == sent > 0


def test_a_card_of_ones_own_is_pushed_as_it_is_unless_the_hub_finds_it_invalid(hub, push, chain, tmp_path):
    (tmp_path / "mine.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    done = push("--card", str(tmp_path / "mine.md"))
    assert done.returncode == 1 and "Invalid metadata in README.md" in done.stdout
    assert [*hub.repositories["org/model"].commits.values()] == [{}]
    text = str(model_card(chain / "rlvr1/hf", "mit")).replace("Bias, safety", "Bias")
    (tmp_path / "mine.md").write_text(text)
    assert push("--card", str(tmp_path / "mine.md")).returncode == 0
    repository = hub.repositories["org/model"]
    assert repository.commits[repository.branches["main"]]["README.md"].decode() == text


@pytest.mark.parametrize("damage", ["changed", "missing", "listed"])
def test_an_export_that_is_not_as_recorded_is_not_pushed_and_the_hub_is_not_even_asked(hub, push, chain, damage):
    weights = chain / "rlvr1/hf/model/model.safetensors"
    if damage == "changed":
        content = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(content[:-1] + b"x")
    elif damage == "missing":
        weights.unlink()
    else:
        record = read_json(chain / "rlvr1/hf/record.json")
        record["files"]["config.json"]["sha256"] = "0" * 64
        write_json(chain / "rlvr1/hf/record.json", record)
    done = push()
    assert done.returncode == 1 and "not pushed, files differ from the record:" in done.stdout
    assert hub.requests == []


# --- nothing private leaves ---


def forge(chain: Path, names: dict[str, dict]) -> None:
    """Let the export's record list these files, too, and everything that hashes the list agree."""
    record_path, link = chain / "rlvr1/hf/record.json", chain / "rlvr1/hf/model"
    record = read_json(record_path)
    record["files"] |= names
    record["content"] = export_name(record["files"])
    folder = link.resolve().rename(link.resolve().with_name(record["content"]))
    link.unlink()
    link.symlink_to(folder)
    write_json(record_path, record)


def absolute(export: Path, secret: Path) -> str:
    return str(secret)


def upwards(export: Path, secret: Path) -> str:
    return os.path.relpath(secret, export)


def through_a_file(export: Path, secret: Path) -> str:
    return f"config.json/{os.path.relpath(secret, export / 'config.json')}"


def linked(export: Path, secret: Path) -> str:
    (export / "notes.txt").symlink_to(secret)
    return "notes.txt"


def linked_twice(export: Path, secret: Path) -> str:
    (export / "first.txt").symlink_to(secret)
    (export / "notes.txt").symlink_to("first.txt")
    return "notes.txt"


def of_a_linked_folder(export: Path, secret: Path) -> str:
    (export / "additional_chat_templates").symlink_to(secret.parent)
    return f"additional_chat_templates/{secret.name}"


def piped(export: Path, secret: Path) -> str:
    os.mkfifo(export / "notes.txt")
    return "notes.txt"


@pytest.mark.parametrize("is_hashed", [True, False])
@pytest.mark.parametrize(
    "name_of", [absolute, upwards, through_a_file, linked, linked_twice, of_a_linked_folder, piped]
)
def test_no_record_brings_a_file_from_outside_of_the_export_to_the_hub(hub, push, chain, tmp_path, name_of, is_hashed):
    secret = tmp_path / "home/credentials.jinja"
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("aws_secret_access_key = 1234")
    name = name_of((chain / "rlvr1/hf/model").resolve(), secret)
    forge(chain, {name: {"bytes": secret.stat().st_size, "sha256": sha256_file(secret) if is_hashed else None}})
    done = push()
    assert done.returncode == 1 and done.stdout.startswith("error: ")
    assert hub.requests == [] and not hub.stored
    found = refusal(exported_model, chain / "rlvr1/hf/record.json")
    assert "damaged (the file" in found or "leads out of" in found or "is no regular file" in found


def test_a_file_that_the_record_does_not_list_starts_no_stage_and_is_not_pushed(hub, push, chain, tmp_path):
    export = chain / "rlvr1/hf/model"
    (export / "adapter_config.json").write_text("{}")  # transformers would load it
    assert "is not among the export's files" in refusal(exported_model, chain / "rlvr1/hf/record.json")
    done = push()
    assert done.returncode == 1 and "adapter_config.json: is not among the export's files" in done.stdout
    assert hub.requests == []


def test_a_file_that_is_replaced_after_it_was_verified_is_not_pushed(chain, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    link = verified_link(chain / "rlvr1/hf")
    config = chain / "rlvr1/hf/model/config.json"
    content = config.read_bytes()
    config.unlink()
    config.write_bytes(content[:-1] + b" ")
    assert "has changed since the export was verified" in refusal(push_link, link, "org/model", "card")


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, "no token: export HF_TOKEN with write access"),
        (READER, "the hub refuses it (403: your token may only read); may your token"),
        ("hf_expired", "the hub refuses it (401"),
    ],
)
def test_a_token_that_may_not_write_is_one_clear_message(hub, push, token, expected):
    done = push(token=token)
    assert done.returncode == 1 and done.stdout.startswith("error: ") and expected in done.stdout
    assert not hub.stored and "hf_expired" not in done.stdout


def test_a_hub_that_fails_in_the_middle_leaves_no_half_pushed_model_and_the_next_push_goes_on(hub, push):
    hub.faults["/commit/"] = [Fault(status=500)]
    done = push()
    assert done.returncode == 1 and "run it again" in done.stdout
    assert [*hub.repositories["org/model"].commits.values()] == [{}]
    assert push().returncode == 0
