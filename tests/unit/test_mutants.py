"""Every damaged recipe, site, config, model folder and data card is fine, or one short message with its file."""

import gzip
import json
import os
import re
import shutil
import struct
import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from resource import RLIMIT_AS, RUSAGE_SELF, getrlimit, getrusage

import pytest

from scripts.data.data_files import Listing, files_of_split
from scripts.data.published import PublishedFile
from scripts.data.shapes import Mapper
from scripts.errors import LONGEST, UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.recipe.source import Part
from scripts.rows.jsonl import read_rows
from tests.conftest import ROOT, refusal
from tests.mutants import BOMB, VALUES, mutants, tried

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="envs/trl.txt is not installed")
GIB = 1 << 30
NONE = (
    "null",
    "[]",
    "{}",
    '"text"',
    "12",
    "0.5",
    "true",
    "",
    "{",
    "[" * 100_000,
    '{"a": NaN}',
    '"\\ud800"',
    "\ufeff{}",
)


@pytest.fixture
def soon(monkeypatch):
    """A limit of a second, not ten, and of 256 MiB."""
    monkeypatch.setattr("scripts.rows.bounds.SECONDS", 1)
    monkeypatch.setattr("scripts.data.published.LARGEST_READ", 1 << 28)
    monkeypatch.setattr("scripts.data.published.LONGEST_LINE", 1 << 24)


@pytest.mark.slow
def test_a_mutant_is_fine_or_one_message(tmp_path):
    found = [(kind, found.outcome, found.says) for kind, _, found in mutants(400, 29, tmp_path)]
    assert [each for each in found if each[1] == "failed"] == []
    assert {kind for kind, *_ in found} == {"recipe", "site", "config"}
    counts = Counter(outcome for _, outcome, _ in found)
    assert counts["refused"] > 200 and counts["fine"] > 20


@pytest.mark.slow
def test_every_value_and_key_is_fine_or_one_message(tmp_path):
    path = tmp_path / "mutant.yaml"
    whole = (ROOT / "config/recipes/tiny-sweep.yaml").read_text()
    for value in VALUES:
        for text in (
            f"{value}\n",
            f"{value}: 1\n{whole}",
            f"{whole}\nnote: {value}",
            f"{whole}\nstart: {value}",
            BOMB + f"note: *a11\n{whole}",
        ):
            path.write_text(text, errors="surrogatepass")
            found = tried(lambda: load_recipe(path), str(path))
            assert found.outcome != "failed", found.says


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BOMB + "note: *a11", 6, "more than 100000 values"),
        ("name: x\nnote: " + "[" * 10**6, 2, "100 levels"),
        ("name: x\n" + "# a\n" * (5 << 20), 1, "16 MiB"),
        ("name: x\nnote: 2026-13-45", 2, "month must be in 1..12; put a text into quotes"),
        ("name: x\nnote: 2026-01-01", 2, "no value of JSON"),
        ("name: x\nnote: !!binary aGk=", 2, "no value of JSON"),
        ("name: x\nnote: !!int abc", 2, "invalid literal for int"),
        ('name: x\nnote: "\\UFFFFFFFF"', 2, "not valid YAML: found invalid Unicode character escape code"),
        ("name: x\n1: 2", 2, "key 1 is no text; put it into quotes"),
        ("name: x\nseed: " + "9" * 5000, 2, "int expected"),
    ],
)
def test_a_mistake_of_yaml_has_its_line(tmp_path, text, line, says):
    (tmp_path / "r.yaml").write_text(text)
    said = refusal(load_recipe, tmp_path / "r.yaml")
    assert said.startswith(f"{tmp_path}/r.yaml:{line}: ") and says in said and len(said) <= LONGEST


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("algorithm: grpo", "algorithm: {}"),
        ("algorithm: grpo", "algorithm: [grpo]"),
        ("algorithm: grpo", "algorithm: grpo, sweep: {0.7: [1]}"),
        ("algorithm: grpo", "algorithm: grpo, sweep: {'..': [1]}"),
        ("algorithm: grpo", "algorithm: grpo, sweep: [{seed: {}}, {seed: []}]"),
        ("evaluation:", "evaluation: text\nx:"),
        ("blends:", "environments: {name: 0.7}\nblends:"),
        ("blends:", "environments: {name: [a]}\nblends:"),
        ("blends:", f"environments: {{name: {'x' * 5000}}}\nblends:"),
        ("stages:", "stages: {0.7: {sweep: {seed: [1]}, algorithm: grpo}}\nx:"),
    ],
)
def test_a_mistake_of_a_recipe_has_its_line(tmp_path, old, new):
    whole = (ROOT / "config/recipes/tiny.yaml").read_text()
    assert old in whole
    (tmp_path / "r.yaml").write_text(whole.replace(old, new, 1))
    assert re.match(f"{tmp_path}/r.yaml:\\d+: .{{4,1150}}", refusal(load_recipe, tmp_path / "r.yaml"))


@pytest.mark.parametrize("text", ["recipe: 2026-13-45", "1: 2", BOMB + "recipe: *a11", "recipe: !!int x"])
def test_a_config_that_snakemake_cannot_read_is_one_message(tmp_path, monkeypatch, text):
    from scripts.controller.console import Console

    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text(text)
    assert re.match(r"config/config.yaml:\d: ", Console(None).line(ValueError("Snakemake's own")))


def test_a_long_message_keeps_its_first_lines_and_its_last():
    assert len(str(UserError("x" * 312_975))) <= LONGEST
    lines = str(
        UserError("\n".join(["stage a is not ready:", *(f"  problem {number}" for number in range(900)), "the remedy"]))
    ).split("\n")
    assert lines[:2] == ["stage a is not ready:", "  problem 0"] and lines[-1] == "the remedy"
    assert lines[-2] == f"  ... and {900 - len(lines) + 3} lines more ..." and sum(map(len, lines)) <= LONGEST
    long = str(UserError("file.yaml:3: " + "x" * 5000 + "; the remedy"))
    assert long.startswith("file.yaml:3: xxx") and long.endswith("xxx; the remedy")


def test_many_variants_steps_and_layers_are_refused(tmp_path):
    whole = (ROOT / "config/recipes/tiny.yaml").read_text()
    many = [*range(10, 2000, 10)]
    for old, new, says in [
        ("blend: sft,", f"blend: sft, sweep: {{seed: {many}, sft.max_num_steps: {many}}},", "more than 1000 variants"),
        ("blend: sft,", f"blend: sft, checkpointing: {{keep_steps: {[*range(200_000)]}}},", "more than 100000 values"),
        ("  num_hidden_layers: ", "  num_hidden_layers: 1000000000 #", "less than or equal to 1000"),
        ("  hidden_size: ", "  hidden_size: 1000000000 #", "less than or equal to 131072"),
    ]:
        assert old in whole
        (tmp_path / "r.yaml").write_text(whole.replace(old, new, 1))
        assert says in refusal(load_recipe, tmp_path / "r.yaml")


# --- model folders ---


def other(**settings):
    """Settings in place of a JSON file's."""
    return lambda text: json.dumps(json.loads(text) | settings)


def of_config(*keys):
    wrong = (None, "x", -1, 0, 1.5, [], {}, True, 10**9, 10**30, "x" * 300_000)
    return [("config.json", f"{key} {str(value)[:9]}", other(**{key: value})) for key in keys for value in wrong]


def header(size: int, content: str = ""):
    return lambda _: struct.pack("<Q", size) + content.encode()


FORMS = [
    *(
        (file, f"is {text[:12]!r}", lambda _, text=text: text)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
        for text in NONE
    ),
    *of_config("num_hidden_layers", "hidden_size", "vocab_size", "architectures", "model_type"),
    *(
        ("config.json", f"{key} {value!r:.20}", other(**{key: value}))
        for key, value in [
            ("auto_map", []),
            ("auto_map", {"AutoConfig": 1}),
            ("auto_map", {"AutoConfig": [[]]}),
            ("quantization_config", 1),
            ("quantization_config", [1]),
            ("text_config", 1),
            ("text_config", []),
            ("rope_parameters", 1),
            ("rope_scaling", {"type": "x"}),
            ("layer_types", ["x"]),
            ("layer_types", "x"),
            ("num_attention_heads", 0),
            ("num_attention_heads", 10**9),
            ("num_key_value_heads", 3),
            ("head_dim", 0),
            ("head_dim", 10**15),
            ("torch_dtype", "x"),
            ("dtype", 5),
            ("hidden_act", "x"),
            ("pad_token_id", 10**9),
            ("intermediate_size", 10**18),
            ("max_position_embeddings", -1),
            ("max_position_embeddings", 10**18),
            ("id2label", 3),
            ("num_labels", 10**9),
            ("transformers_version", 3),
            ("eos_token_id", {}),
            ("layer_types", ["full_attention"] * 9),
            ("sliding_window", "x"),
            ("num_hidden_layers", 3),
            ("num_experts", 10**9),
            ("use_cache", "x"),
            ("tie_word_embeddings", "x"),
            ("rms_norm_eps", "x"),
            ("is_encoder_decoder", "x"),
            ("vision_config", 5),
            ("initializer_range", -1),
        ]
    ),
    *(
        ("tokenizer_config.json", f"{key} {value!r:.20}", other(**{key: value}))
        for key, value in [
            ("tokenizer_class", 1),
            ("tokenizer_class", "Nope"),
            ("eos_token", 5),
            ("eos_token", {}),
            ("pad_token", []),
            ("added_tokens_decoder", 1),
            ("added_tokens_decoder", {"x": {}}),
            ("added_tokens_decoder", {"0": 1}),
            ("chat_template", 5),
            ("chat_template", [1]),
            ("chat_template", [{"name": "default"}]),
            ("chat_template", {}),
            ("model_max_length", "x"),
            ("extra_special_tokens", 5),
            ("padding_side", "up"),
            ("auto_map", {"AutoTokenizer": "x"}),
        ]
    ),
    *(
        ("generation_config.json", f"{key} {value!r:.20}", other(**{key: value}))
        for key, value in [
            ("eos_token_id", "x"),
            ("eos_token_id", [[]]),
            ("eos_token_id", 10**9),
            ("eos_token_id", -1),
            ("eos_token_id", ["x"]),
            ("pad_token_id", "x"),
            ("temperature", "hot"),
            ("do_sample", 5),
            ("max_new_tokens", -1),
            ("cache_implementation", "x"),
        ]
    ),
    *(
        ("model.safetensors", name, make)
        for name, make in [
            ("empty", lambda _: b""),
            ("cut", lambda whole: whole[:-9]),
            ("zeros", lambda whole: bytes(len(whole))),
            ("text", lambda _: b"<html>"),
            ("10^12", header(10**12)),
            ("2^63", header(1 << 63)),
            ("list", header(2, "[]")),
            ("of text", header(3, '"x"')),
            ("number of tensor", header(7, '{"a":1}')),
            ("deep", header(100_000, "[" * 100_000)),
            ("half", lambda whole: whole[: len(whole) // 2]),
            ("no offsets", header(8, '{"a":{}}')),
            ("negative", header(57, '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[-4, 0]}}')),
            ("text as shape", header(56, '{"a":{"dtype":"F32","shape":"xx","data_offsets":[0, 0]}}')),
            ("other", header(56, '{"a":{"dtype":"F99","shape":[12],"data_offsets":[0, 0]}}')),
            ("text as offsets", header(52, '{"a":{"dtype":"F32","shape":[],"data_offsets":"ab"}}')),
            ("metadata", header(18, '{"__metadata__":1 }')),
            ("huge offsets", header(62, '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + "9" * 10 + "]}}")),
        ]
    ),
    *(
        ("model.safetensors.index.json", f"is {text[:20]!r}", lambda _, text=text: text)
        for text in (
            *NONE,
            '{"weight_map": 1}',
            '{"weight_map": []}',
            '{"weight_map": {"a": 1}}',
            '{"weight_map": {"a": "../../x"}}',
        )
    ),
    *(
        ("chat_template.jinja", f"is {text[:25]!r}", lambda _, text=text: text)
        for text in (
            "",
            "{{",
            "{% x %}",
            "{{ 1 / 0 }}",
            "{{ messages[9] }}",
            "{{ raise_exception('x' * 5000) }}",
            "{% for i in range(10**9) %}{% endfor %}",
            "{{ 'x' * 10**11 }}",
            "{{ 'x' * 10**8 }}",
            "{{ {}.a.b }}",
            "{{ messages.x() }}",
            "{{ ().__class__ }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% include 'x' %}",
            "{{ 5 + 'x' }}",
            "{% for m in messages %}{{ m.content[99] | upper }}{% endfor %}",
            "{{ 'x' | nofilter }}",
            "{% " * 5000,
            "{{ (" * 500 + "1" + ") }}" * 500,
            "x" * 10_000_000,
            "\x00",
            "{% if x %}" * 150 + "{% endif %}" * 150,
        )
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    from tests.pretrained import save_pretrained

    folder = tmp_path_factory.mktemp("model")
    save_pretrained("qwen3", folder)
    return folder


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("file", "name", "make"), FORMS, ids=[f"{file}: {name}" for file, name, _ in FORMS])
def test_a_damaged_model_is_fine_or_one_message(tmp_path, soon, whole, file, name, make):
    from scripts.train.export import export_pretrained

    path = shutil.copytree(whole, tmp_path / "model") / file
    binary = file.endswith(".safetensors")
    before = path.read_bytes() if path.exists() else b""
    content = make(before if binary else before.decode())
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    found = tried(
        lambda: export_pretrained(PretrainedModel(name=str(path.parent)), tmp_path / "hf"),
        str(path.parent),
        str(tmp_path),
    )
    assert found.outcome != "failed", found.says


# --- data cards ---

FILES = {"README.md", "data/train-00000-of-00001.parquet", "data/test.parquet", "a" * 200 + ".parquet"}
CARDS = {
    "whole": "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/train-*}\n  - {split: test, path: data/test.parquet}",
    "a text": "text",
    "a list": "- configs",
    "a number": "12",
    "configs is a number": "configs: 5",
    "configs is a text": "configs: text",
    "configs is a mapping": "configs: {a: 1}",
    "configs of texts": "configs: [a, 1, ~, []]",
    "an alias of aliases": BOMB + "configs: [{config_name: *a11, data_files: x}]",
    "a deep alias": BOMB + "configs: [{config_name: default, data_files: [{split: *a4, path: data/test.parquet}]}]",
    "a circle": "configs: &a [*a]",
    "a mapping in a circle": "configs: &a [{config_name: default, data_files: *a}]",
    "deep lists": "configs: " + "[" * 200_000,
    "many values": "configs: [" + "1, " * 200_000 + "1]",
    "no date": "date: 2026-13-45\nconfigs: []",
    "a date": "date: 2026-01-01\n",
    "no number": "x: !!int abc",
    "a wrong escape": 'x: "\\UFFFFFFFF"',
    "binary": "configs: !!binary '%'",
    "a class": "x: !!python/object:os.system x",
    "a tab": "configs:\n\t- x",
    "a key of a list": "? [a]\n: 1",
    "a NUL": 'configs: [{config_name: default, data_files: "a\\0*"}]',
    **{
        f"data_files {value}": f"configs: [{{config_name: default, data_files: {value}}}]"
        for value in (
            "5",
            "[5]",
            "[[]]",
            "{}",
            "[~]",
            "{path: 5}",
            "{path: [5]}",
            "{path: {a: 1}}",
            "{split: [], path: data/test.parquet}",
            "'**a'",
            "'[a-'",
            "'../*'",
            "'/etc/*'",
            "''",
            f"'{'*a' * 60}b'",
            f"'{'x' * 300_000}'",
            f"'{'*' * 9}/{'?' * 9}'",
            "'[z-a]*'",
            "2026-01-01",
        )
    },
    **{
        f"data_dir {value}": f"configs: [{{config_name: default, data_dir: {value}}}]"
        for value in ("5", "[a]", "{}", "nowhere", f"'{'x' * 300_000}'")
    },
    **{
        f"config_name {value}"[:40]: f"configs: [{{config_name: {value}, data_files: data/*}}]"
        for value in ("5", "~", "[]", "{a: b}", f"'{'x' * 300_000}'")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_damaged_data_card_is_fine_or_one_message(card, monkeypatch):
    monkeypatch.setattr("scripts.rows.bounds.SECONDS", 1)
    listing = Listing("org/set", FILES, lambda _: f"---\n{card}\n---\n")
    found = tried(lambda: files_of_split(listing, None, None), "org/set")
    assert found.outcome != "failed", found.says


# --- templates, patterns and packed files ---


TWICE = "{% for i in range(99999) %}{% for j in range(99999) %}TEXT{% endfor %}{% endfor %}"
LOOPS = (
    TWICE.replace("TEXT", ""),
    TWICE.replace("TEXT", "x" * 99),
    "{{ 'x' * 10**11 }}",
    "{% set ns = namespace(x='x' * 99) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
)


@pytest.mark.slow
@pytest.mark.parametrize("template", LOOPS, ids=range(len(LOOPS)))
def test_a_template_without_an_end_is_ended(tmp_path, soon, template):
    """So is a template of whatever memory: each adds less than the limit."""
    from scripts.model.lengths import TokenCounter

    before, limit = getrusage(RUSAGE_SELF).ru_maxrss, getrlimit(RLIMIT_AS)
    counter = TokenCounter(str(tmp_path / "tokenizer.json"), template)
    assert "look for a loop" in refusal(lambda: counter.has_template)
    assert getrlimit(RLIMIT_AS) == limit and getrusage(RUSAGE_SELF).ru_maxrss < before + (GIB >> 10)


def test_a_pattern_that_backtracks_is_ended(soon):
    part = Part(remove="(a+)+$")
    mapper = Mapper(part, "demonstrations", ("prompt", "completion"), is_table=False)
    said = refusal(mapper.make, {"prompt": "x", "completion": "a" * 40 + "b"})
    assert said == "remove: (a+)+$: takes more than 1 s; look for a loop"


def packed(name: str, folder: Path) -> PublishedFile:
    """A small file that holds gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, zeros = folder / name, gzip.compress(b"z" * (1 << 26))
    if name.endswith(".parquet"):
        same = pa.array(["x" * (1 << 22)])
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), same)
        kept = pa.table({"prompt": column})
        pq.write_table(kept, path, store_schema=name != "plain.parquet")
        return PublishedFile(path, name)
    head = {".csv": b"prompt\n"}.get(
        path.suffixes[0], b'[{"prompt": "' if ".json" in path.suffixes else b'{"prompt": "'
    )
    path.write_bytes(gzip.compress(head) + zeros * 40)
    return PublishedFile(path, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dictionary.parquet", "plain.parquet", "list.json.gz", "lines.jsonl.gz", "table.csv.gz"]
)
def test_a_packed_file_is_read_within_the_limit(tmp_path, soon, name):
    pytest.importorskip("pyarrow")
    file = packed(name, tmp_path)
    reader = os.fork()
    if reader == 0:
        before = getrusage(RUSAGE_SELF).ru_maxrss
        try:
            for batch in file.batches(["prompt"]):
                batch.rows  # noqa: B018
            status = 2
        except UserError as error:
            status = 0 if str(error).startswith(name) and len(str(error)) < LONGEST else 3
        except BaseException:
            traceback.print_exc()
            status = 4
        os._exit(status if getrusage(RUSAGE_SELF).ru_maxrss < before + (GIB >> 10) else 5)
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_a_long_line_of_a_blend_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.rows.jsonl.LONGEST_LINE", 1000)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": "' + "x" * 2000)
    assert refusal(lambda: [*read_rows(tmp_path / "x.jsonl")]).startswith(f"{tmp_path}/x.jsonl:2: more than ")
