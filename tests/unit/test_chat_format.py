"""What a chat template makes of rows, which tokens of them are learnt, and when a stage would talk otherwise."""

import json

import pytest

pytest.importorskip("transformers", reason="envs/trl.txt is not installed")

from scripts.backends.by_name import backend_of
from scripts.backends.nemo_rl.settings import PASSTHROUGH
from scripts.backends.tokens import shortened_row, shown_row, text_of_rows
from scripts.backends.trl.tokenization import IGNORED, Line, tokenize_answers, tokenize_demonstrations
from scripts.errors import UserError
from scripts.files import read_json, sha256_text, write_json
from scripts.model.model_source import sync_source
from scripts.model.processor import make_tokenizer
from scripts.model.scratch import CHAT_TEMPLATE
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.rows.chat_format import ChatFormat, read_template, training_template_of
from scripts.stage.paths import StagePaths
from scripts.stage.publish import take_settings
from scripts.stage.stage import Stage
from scripts.train.preflight import changes_of_format, check_stage
from tests.conftest import ROOT, SHORT, refusal
from tests.pretrained import TEMPLATE, tokenizer
from tests.stages import ready_stage

TALK = [
    {"role": "user", "content": "2 or 3?"},
    {"role": "assistant", "content": "<think>3 is larger</think>3"},
    {"role": "user", "content": "and 4?"},
    {"role": "assistant", "content": "42"},
]
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}",
)


def changes_of(stage: Stage) -> list[str]:
    return changes_of_format(stage, backend_of(stage.settings.made_by).chat_format(stage))


def line(row: dict) -> Line:
    return Line(7, "split.jsonl:7", json.dumps(row), row)


def learnt(chat_template: str, messages=TALK, made=None, **options) -> list[str]:
    """The texts that are learnt of a conversation, each run of tokens by itself; no label stands at another place."""
    made = made or tokenizer(chat_template=chat_template)
    (row,) = tokenize_demonstrations([line({"messages": messages})], made, max_length=999, variables={}, **options)
    ids, labels = row["input_ids"], row["labels"]
    assert ids == made.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    text = "".join("\0" if label == IGNORED else made.decode([label]) for label in labels)
    return [run for run in text.split("\0") if run]


@pytest.mark.parametrize(
    "chat_template",
    [
        FORGETS,
        TEMPLATE.replace("message['content']", "message['content'] | trim"),
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + TEMPLATE,
        MARKED,
    ],
    ids=["drops earlier reasoning", "strips", "adds a system prompt", "marks"],
)
def test_the_last_answer_alone_is_learnt_whatever_a_template_does_to_what_comes_before(chat_template):
    assert learnt(chat_template) == ["42<|im_end|>\n"]


def merging(*merges: tuple[str, str]):
    """A tokenizer of bytes with these merges, which no pre-tokenizer keeps from crossing from prompt to answer."""
    made = make_tokenizer()
    state = json.loads(made.backend_tokenizer.to_str())
    for left, right in merges:
        state["model"]["merges"].append([left, right])
        state["model"]["vocab"][left + right] = max(state["model"]["vocab"].values()) + 1000
    made.backend_tokenizer.__setstate__(json.dumps(state).encode())
    made.chat_template = (
        "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<|end|>{% endfor %}"
    )
    made.chat_template += "{% if add_generation_prompt %}a:{% endif %}"
    return made


def test_a_token_merged_of_prompt_and_answer_shifts_no_label():
    made = merging((":", "4"))
    assert learnt("", made=made) == ["2<|end|>"]  # ":4" is one token, of which the model never says the half
    with pytest.raises(UserError, match=r"split.jsonl:7: messages\[3\]: begin and end of the answer cannot be prov"):
        learnt("", made=made, assistant_only_loss=True)
    first = "<think>3 is larger</think>3<|end|>"
    assert learnt("", made=merging(("4", "2")), assistant_only_loss=True) == [first, "42<|end|>"]


def test_all_that_the_assistant_says_is_learnt_by_marks_or_by_proof():
    answers = ["<think>3 is larger</think>3<|im_end|>", "42<|im_end|>"]
    assert learnt(MARKED, assistant_only_loss=True) == answers
    assert learnt(TEMPLATE, assistant_only_loss=True) == [f"{answer}\n" for answer in answers]
    with pytest.raises(UserError, match=r"split.jsonl:7: messages\[1\]: .* needs {% generation %} in the template"):
        learnt(FORGETS, assistant_only_loss=True)


def test_of_a_template_that_trl_has_marked_its_name_is_told_and_is_enough():
    with pytest.raises(UserError, match="TRL's qwen3_training, which is this one with such marks"):
        learnt(read_template("qwen3"), assistant_only_loss=True)
    (first, last) = learnt(read_template("qwen3_training"), assistant_only_loss=True)
    assert "3 is larger" in first and last.endswith("42<|im_end|>\n")
    assert training_template_of(TEMPLATE) is None


@pytest.mark.parametrize(
    ("chat_template", "says"),
    [
        (TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>{% endif"), "the prompt goes on with '<think>'"),
        ("{{ raise_exception('Roles must alternate.') }}", "the chat template fails: Roles must alternate."),
    ],
)
def test_a_row_of_which_nobody_can_tell_what_is_learnt_is_refused_with_its_line(chat_template, says):
    pair = {"prompt": "?", "chosen": "yes", "rejected": "no"}
    for rows, made in (({"messages": TALK}, tokenize_demonstrations), (pair, tokenize_answers)):
        with pytest.raises(UserError, match=f"^split.jsonl:7: .*{says}"):
            made([line(rows)], tokenizer(chat_template=chat_template), max_length=99, variables={})


def test_a_template_is_had_from_a_file_a_model_trl_or_as_it_is(tmp_path):
    (tmp_path / "own.jinja").write_text(MARKED)
    tokenizer(chat_template=FORGETS).save_pretrained(tmp_path / "model")
    assert read_template(str(tmp_path / "own.jinja")) == read_template(MARKED) == MARKED
    assert read_template(str(tmp_path / "model")) == FORGETS
    assert "{%- generation %}" in read_template("qwen3_training")
    for named, says in (
        (str(tmp_path / "none.jinja"), "no such file$"),
        ("qwen33", "no template that TRL ships; did you mean qwen3."),
    ):
        with pytest.raises(UserError, match=says):
            read_template(named)


def test_an_edited_template_of_the_first_model_makes_its_export_again_and_an_export_from_before_stays(tmp_path):
    tokenizer().save_pretrained(tmp_path / "model")
    file, directory = tmp_path / "own.jinja", tmp_path / "results/model"
    file.write_text(MARKED)
    model = PretrainedModel(name=str(tmp_path / "model"), chat_template=str(file))
    before = {"model": model.model_dump(mode="json"), "changed": None}
    (directory / "hf/model").mkdir(parents=True)
    (directory / "hf/model/chat_template.jinja").write_text(MARKED)
    write_json(directory / "source.json", before)
    sync_source(model, directory)
    assert read_json(directory / "source.json") == before
    for text in (FORGETS, MARKED):
        file.write_text(text)
        sync_source(model, directory)
        assert read_json(directory / "source.json") == before | {"chat_template": sha256_text(text)}
    file.unlink()
    with pytest.raises(UserError, match=r"model.chat_template: .*own.jinja: no such file"):
        sync_source(model, directory)


def test_what_differs_between_two_formats_is_told_and_how_they_pad_is_no_difference(tmp_path):
    before = tokenizer()
    before.save_pretrained(tmp_path / "before")
    before(["a", "bcd"], padding=True, truncation=True, max_length=9)
    before.save_pretrained(tmp_path / "padded")
    other = tokenizer(chat_template=FORGETS, pad_token="<|reserved|>")
    other.add_tokens(["<|new|>"])
    other.save_pretrained(tmp_path / "other")
    write_json(tmp_path / "other/generation_config.json", {"eos_token_id": [2, 0]})
    write_json(tmp_path / "before/generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    formats = {name: ChatFormat.of(tmp_path / name) for name in ("before", "padded", "other")}
    assert formats["before"].changes(formats["padded"]) == []
    assert (tmp_path / "padded/tokenizer.json").read_bytes() != (tmp_path / "before/tokenizer.json").read_bytes()
    template, pad, ends, words = formats["before"].changes(formats["other"])
    assert template.startswith("the chat template (line 2 was \"{{ message['content'] }}")
    assert pad == "pad_token ('<|endoftext|>', now '<|reserved|>')" and "eos_token_id (2, now [0, 2])" in ends
    assert "'<|new|>' was None, now" in words


ROW = {
    "agent_ref": {"name": "math_with_judge_simple_agent"},
    "responses_create_params": {"input": "q"},
    "question": "q",
    "expected_answer": "1",
}


def export(paths: StagePaths, chat_template: str = CHAT_TEMPLATE) -> None:
    """Export the demo's tokenizer with a chat template as a stage's."""
    made = make_tokenizer()
    made.chat_template = chat_template
    made.save_pretrained(paths.exported("0"))
    write_json(paths.exported("0") / "config.json", {"vocab_size": len(made)})
    write_json(paths.export_record, {"stage": paths.name, "step": 1, "identity": "0", "content": "0", "files": {}})
    paths.export.symlink_to("../exports/0")


@pytest.fixture
def stage(tmp_path):
    """A stage of GRPO whose parent has exported the demo's tokenizer; the recipe says `more` of it."""

    def make(more: str = ""):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(SHORT.read_text().replace("rlvr1: {algorithm: grpo,", f"rlvr1: {{{more} algorithm: grpo,"))
        made = ready_stage(load_recipe(recipe), tmp_path / "results", "rlvr1", [ROW] * 40)
        if not made.parent.paths.export.exists():
            export(made.parent.paths)
        return made

    return make


def first_tokens(stage: Stage) -> list[str]:
    return backend_of("trl").shown_rows(stage, 1)[0]["parts"][0]["texts"][:2]


def test_a_stage_that_would_talk_otherwise_than_its_parent_is_refused_unless_it_says_so(stage, tmp_path):
    changed = tmp_path / "changed.jinja"
    first = "{% for message in messages %}"
    changed.write_text(CHAT_TEMPLATE.replace(first, "{{ '' }}\n" + first))
    named = f"policy: {{tokenizer: {{chat_template: {changed}}}}},"
    plain, other = stage(), stage(named)
    assert plain.config.chat_template is None and "tokenizer" not in plain.config.values()["policy"]
    assert other.config.chat_template == changed.read_text() and other.config.content != plain.config.content
    assert first_tokens(plain) == ["<|user|>", "q"] and changes_of(plain) == []
    with pytest.raises(UserError, match=r"parent sft trained: the chat template \(line 1 was .*template_chang"):
        check_stage(other)
    allowed = stage(f"{named} template_change: true,")
    assert allowed.config.content == other.config.content  # known by the text, not by the leave
    assert first_tokens(allowed) == ["\n", "<|user|>"] and changes_of(allowed) == []
    moved = changed.rename(tmp_path / "moved.jinja")
    assert stage(named.replace(str(changed), str(moved))).config.content == other.config.content
    says = r"recipe.yaml:\d+: stages.rlvr1.policy.tokenizer.chat_template: .*: no such file"
    with pytest.raises(UserError, match=says):
        stage(named)


def test_an_export_that_talks_otherwise_than_its_stage_trained_is_found_by_the_stage_after_it(stage, tmp_path):
    """As where a converter takes tokenizer and template from elsewhere."""
    made = stage()
    (made.parent_export.resolve() / "chat_template.jinja").write_text(CHAT_TEMPLATE + " ")
    assert changes_of(made) == []  # its parent began with no export to differ from
    export(made.paths)
    grandchild = made.recipe.stages["rlhf"].model_copy(update={"parent": "rlvr1"})
    recipe = made.recipe.model_copy(update={"stages": {**made.recipe.stages, "rlhf": grandchild}})
    child = ready_stage(recipe, tmp_path / "results", "rlhf", [ROW] * 40)
    assert "than its parent rlvr1 trained: the chat template" in refusal(check_stage, child)


def test_what_is_published_has_the_parents_settings_to_the_byte_and_the_template_that_the_stage_names(tmp_path):
    for name, pad in (("parent", "<|endoftext|>"), ("trained", "<|im_end|>")):
        tokenizer(pad_token=pad).save_pretrained(tmp_path / name)
        write_json(tmp_path / name / "config.json", {"dtype": "float32", "pad_token_id": 0})
        write_json(
            tmp_path / name / "generation_config.json", {"eos_token_id": 2, "pad_token_id": int(name == "parent")}
        )
    parent = {path.name: path.read_bytes() for path in (tmp_path / "parent").iterdir()}
    take_settings(tmp_path / "parent", tmp_path / "trained")
    assert {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()} == parent
    settings = read_json(tmp_path / "parent/tokenizer_config.json")
    write_json(tmp_path / "parent/tokenizer_config.json", {**settings, "chat_template": TEMPLATE})
    take_settings(tmp_path / "parent", tmp_path / "trained", MARKED)
    assert (tmp_path / "trained/chat_template.jinja").read_text() == MARKED
    assert read_json(tmp_path / "trained/tokenizer_config.json") == settings  # one template, wherever one looks
    assert (tmp_path / "parent/chat_template.jinja").read_text() == TEMPLATE


def test_rows_are_shown_token_by_token_with_what_is_learnt_marked():
    made = make_tokenizer()
    ids = made("é\x1b")["input_ids"]
    row = shown_row(3, [("prompt", False, [made.eos_token_id]), ("chosen", True, ids)], made)
    plain = text_of_rows([row], "split.jsonl", coloured=False)
    assert plain == "split.jsonl:3: 4 tokens, 3 learnt\n  prompt: <|end|>\n  chosen: [[Ã¦©¦\\x1b]]"
    coloured = text_of_rows([row], "split.jsonl", coloured=True)
    assert coloured.count("\x1b[0m") == 4 and "[[" not in coloured and "\\x1b" in coloured
    long = shown_row(1, [("", False, made("x" * 500)["input_ids"])], made)
    assert shortened_row(long)["parts"][0]["texts"][80] == " … 380 more … " and long["tokens"] == 500


def test_a_stage_of_nemo_rl_talks_as_its_recipe_tells_and_a_file_is_known_by_its_content(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/steps-rlvr-tiny.yaml")
    (name, settings), file = next(iter(recipe.stages.items())), tmp_path / "own.jinja"
    tokenizer().save_pretrained(tmp_path / "model")
    model = recipe.model.model_copy(update={"name": str(tmp_path / "model")})

    def stage(**says) -> Stage:
        policy = {**settings.policy, **({"tokenizer": says} if says else {})}
        stages = {name: settings.model_copy(update={"policy": policy})}
        return Stage(recipe.model_copy(update={"model": model, "stages": stages}), tmp_path, name)

    nemo_rl, known = backend_of("nemo_rl"), set()
    for text in (MARKED, FORGETS):
        file.write_text(text)
        named = stage(chat_template=str(file))
        assert nemo_rl.chat_format(named).chat_template == text
        known.add(named.config.content)
    assert len(known) == 2 and "template_sha256" not in stage().config.values()
    assert (
        nemo_rl.chat_format(stage()).chat_template == nemo_rl.chat_format(stage(chat_template="default")).chat_template
    )
    assert nemo_rl.chat_format(stage(chat_template=None)).chat_template == PASSTHROUGH
    assert nemo_rl.chat_format(stage(chat_template="/in/the/container.jinja")) is None
    (tmp_path / "data" / settings.blend).mkdir(parents=True)
    row = {"responses_create_params": {"input": "2 or 3?"}}
    stage().train_split.write_text(json.dumps(row) + "\n")
    (shown,) = nemo_rl.shown_rows(stage(), 3)
    asked = tokenizer().apply_chat_template(
        [{"role": "user", "content": "2 or 3?"}], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    assert shown["parts"][0]["ids"] == asked["input_ids"]
