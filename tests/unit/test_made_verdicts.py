"""Verdicts on responses that a model made: asked for again where anything they depend on has changed, kept elsewhere."""

import json
import math
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from scripts.errors import UserError
from scripts.recipe.blend import GeneratedBlend
from scripts.recipe.load import load_recipe
from scripts.records import LeftUnjudged, read_record
from scripts.rewards import judging_code, registry
from scripts.rewards.judging_code import code_of, code_of_file
from scripts.sampling import judge as judging
from scripts.sampling.kept import Kept, folder_of_answers
from scripts.sampling.sample import RESPONSES, is_response, sample
from scripts.sampling.select import NOT_FINITE, Selection
from scripts.sampling.verdicts import is_verdict
from scripts.stage.data_settings import UNJUDGED
from scripts.stage.rule_settings import settings_files
from scripts.stage.tables import read_table, write_table
from tests.conftest import ROOT, refusal

MCQA = "mcqa_simple_agent"
RECIPE = (ROOT / "config/recipes/tiny-rft.yaml").read_text()
ENVIRONMENT = """
import os
from pathlib import Path
import helper

def verify(row, response):
    with Path("asked.txt").open("a") as file:
        file.write(response.replace("\\n", " ") + "\\n")
    if response.replace("\\n", " ") in os.environ.get("BREAKS", ""):
        raise RuntimeError("broken today")
    return helper.rate(response)
"""
HELPER = "def rate(response):\n    return float(len(response) % 2)\n"


class Project:
    """Prompts, responses to them, and the recipe by which they are judged, in the working directory."""

    def __init__(self, environment: str, **source: object) -> None:
        recipe = yaml.safe_load(RECIPE)
        recipe["environments"] = {"own": "own.py"}
        recipe["blends"]["prompts"]["environments"] = [environment]
        recipe["blends"]["prompts"]["source"] = {"kind": "folder", "path": "rows"}
        del recipe["blends"]["prompts"]["rows"]
        recipe["blends"]["best"]["source"] |= source
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        Path("own.py").write_text(ENVIRONMENT)
        Path("helper.py").write_text(HELPER)
        self.rows = [
            {
                "agent_ref": {"type": "responses_api_agents", "name": environment},
                "responses_create_params": {"input": [{"role": "user", "content": f"{number}\nA: a\nB: b"}]},
                "options": [{"A": "a"}, {"B": "b"}],
                "expected_answer": "A",
                "grading_mode": "lenient_answer_colon",
            }
            for number in range(4)
        ]
        texts = ("Answer: A", "Answer: B", "So\nAnswer: A", "Answer: none")
        responses = [
            {"model": 0, "line": line, "sample": sample, "response": f"{line}\n{text}", "tokens": 5, "cut": False}
            for line in range(1, 5)
            for sample, text in enumerate(texts)
        ]
        write_table(pa.Table.from_pylist(responses, schema=RESPONSES), Path("1-of-1.parquet"))

    def judge(self, store: str = "samples", **options: object) -> list[float | None]:
        """The rewards of the responses, judged in this process."""
        Path("prompts").mkdir(exist_ok=True)
        Path("prompts/train-split.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        sys.modules.pop("helper", None)
        judging.main(
            recipe=Path("recipe.yaml"),
            blend="best",
            prompts=Path("prompts/train-split.jsonl"),
            responses=[Path("1-of-1.parquet")],
            store=Path(store),
            output=Path("out/judged.parquet"),
            **options,
        )
        return read_table(Path("out/judged.parquet"), judging.JUDGED)["reward"].to_pylist()

    def asked(self) -> list[str]:
        """The responses that the user's environment was asked about since the last time."""
        log = Path("asked.txt")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory that Python imports from, with environments of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    return tmp_path


def lines_kept() -> list[Path]:
    return sorted(Path("samples").rglob("*.jsonl"))


# --- what a verdict depends on ---


def test_other_gold_answers_are_judged_again_and_equal_ones_are_not(here):
    project = Project(MCQA)
    assert project.judge() == [1.0, 0.0, 1.0, 0.0] * 4
    written = [path.read_bytes() for path in lines_kept()]
    assert project.judge() == [1.0, 0.0, 1.0, 0.0] * 4
    assert [path.read_bytes() for path in lines_kept()] == written, "nothing is asked twice"
    project.rows[1]["expected_answer"] = project.rows[3]["expected_answer"] = "B"
    assert project.judge() == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0] * 2
    again = sum(len(json.loads(line)) for path in lines_kept() for line in path.read_text().splitlines())
    assert again == 16 + 8, "the verdicts on the other prompts stand"


def test_another_text_of_an_imported_module_is_judged_again(here):
    project = Project("own")
    before = project.judge()
    assert len(project.asked()) == 16
    Path("helper.py").write_text(HELPER.replace("% 2", "% 3 / 2"))
    after = project.judge()
    assert after != before and after == project.judge("fresh")
    assert len(project.asked()) == 32


def test_other_code_of_the_shipped_verifier_is_judged_again(here, monkeypatch):
    project = Project(MCQA)
    before = project.judge()
    spec = registry.SPECS[MCQA]
    monkeypatch.setitem(registry.SPECS, MCQA, judging_spec(spec, lambda row, response: 1 - spec.verify(row, response)))
    assert project.judge() == before, "the same code, so far as the text tells"
    edited = copied_scripts(here, monkeypatch)
    verifier = edited / "rewards/environments/mcqa.py"
    verifier.write_text(verifier.read_text().replace("return float(", "return 1 - float("))
    judging_code._code_here.cache_clear()
    assert project.judge() == [1 - reward for reward in before]


def judging_spec(spec, verify):
    from dataclasses import replace

    return replace(spec, verify=verify)


def copied_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the code that judges, of which the hashes are taken."""
    for room in judging_code.JUDGING_ROOMS:
        shutil.copytree(ROOT / "scripts" / room, folder / "copy/scripts" / room, ignore=shutil.ignore_patterns("__p*"))
    monkeypatch.setattr(judging_code, "installation", lambda: folder / "copy")
    judging_code._code_here.cache_clear()
    return folder / "copy/scripts"


@pytest.fixture(autouse=True)
def _forget_copies():
    yield
    judging_code._code_here.cache_clear()


@pytest.mark.parametrize(
    ("file", "edit", "is_other"),
    [
        ("rewards/environments/mcqa.py", ("return float(", "return 1 - float("), True),
        ("rewards/environments/mcqa.py", ("\n\n\n", "\n\n\n# a comment\n"), False),
        ("rewards/environments/mcqa.py", ('"""', '"""Other words. '), False),
        ("rewards/response.py", ("import ast\n", "import ast\n\nMORE = 1\n"), True),
        ("rewards/registry.py", ("THREADS = 64", "THREADS = 63"), True),
        ("rewards/answers.py", ("answer.lstrip", "answer.strip"), True),
        ("rows/thoughts.py", ("import re\n", "import re\n\nMORE = 1\n"), True),
        ("rewards/environments/math.py", ("\nfrom ", "\nMORE = 1\nfrom "), False),
        ("rewards/gym.py", ("SHOWN, LINES = 400", "SHOWN, LINES = 401"), False),
    ],
)
def test_the_code_of_a_shipped_verifier_counts_with_all_it_runs_and_its_words_do_not(
    tmp_path, monkeypatch, file, edit, is_other
):
    scripts = copied_scripts(tmp_path, monkeypatch)
    before = code_of(MCQA, {}).sha256
    text = (scripts / file).read_text()
    assert edit[0] in text
    (scripts / file).write_text(text.replace(*edit, 1))
    judging_code._code_here.cache_clear()
    assert (code_of(MCQA, {}).sha256 != before) == is_other


@pytest.mark.parametrize(
    "text",
    [
        "import helper",
        "from helper import rate",
        "import helper as other",
        "def verify(row, response):\n    from helper import rate",
        "from importlib import import_module\nhelper = import_module('helper')",
        "import package.inner",
        "from package import inner",
        "from package.inner import rate",
        "import package",
        "import far",
        "from pathlib import Path\nWORDS = Path(__file__).with_name('words.txt').read_text()",
        "WORDS = open('words.txt').read()",
    ],
)
def test_what_an_environment_imports_or_names_counts_through_other_modules_too(here, text):
    Path("helper.py").write_text("import json\nfrom deeper import DEPTH\n")
    Path("deeper.py").write_text("DEPTH = 1\n")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("from . import inner\n")
    Path("package/inner.py").write_text("from ..deeper import DEPTH\nfrom .innermost import DEPTH\n")
    Path("package/innermost.py").write_text("import deeper\n")
    Path("far.py").write_text("import package.inner\n")
    Path("words.txt").write_text("one")
    Path("own.py").write_text(text + "\n")
    before = code_of_file(Path("own.py")).sha256
    assert code_of_file(Path("own.py")).sha256 == before
    changed = "words.txt" if "words" in text else "deeper.py"
    Path(changed).write_text("DEPTH = 2\n")
    assert code_of_file(Path("own.py")).sha256 != before


def test_installed_packages_count_by_their_version_and_odd_files_end_nothing(here):
    Path("own.py").write_text("import json, regex, own, absent.module\nfrom . import beside\nNAME = 'a' * 300 + '.x'\n")
    code = code_of_file(Path("own.py"))
    assert [*code.texts] == ["own.py"]
    assert "regex" in code.with_versions and "json" not in code.with_versions
    Path("own.py").write_text("this is no Python: '../..' '/' '.' 'a\\0.b' '" + "é" * 250 + ".x'")
    assert [*code_of_file(Path("own.py")).texts] == ["own.py"]
    assert code_of_file(Path("gone.py")).texts == {}
    os.mkfifo("pipe.py")
    Path("own.py").write_text("import pipe\nNAME = 'pipe.py'\n")
    assert [*code_of_file(Path("own.py")).texts] == ["own.py"]


def test_the_rule_is_told_of_other_code_other_servers_and_missing_verdicts(here):
    Project("own")

    def text() -> str:
        found = settings_files(load_recipe(Path("recipe.yaml")), Path("results"))
        return found[Path("results/settings/generated/best/judge.json")].text

    texts = [text()]
    Path("helper.py").write_text(HELPER + "\n")
    texts.append(text())
    gym = {"version": "0.4.0", "servers": ["elsewhere"], "agents": {"elsewhere": [MCQA]}}
    for reach in ({"base_url": "http://a:1"}, {"base_url": "http://a:2"}, {"base_url": "http://a:2", "revision": "7"}):
        Project(MCQA, gym=gym, gym_servers={"elsewhere": reach})
        texts.append(text())
    Project(MCQA, gym=gym, gym_servers={"elsewhere": {"base_url": "http://b:3", "revision": "7"}})
    assert text() == texts[-1], "a revision counts in place of the address"
    judging.note_unjudged(Path("results/data/best/generated") / UNJUDGED, "responses", 1)
    texts.append(text())
    assert len({*texts}) == len(texts)


def test_a_revision_needs_an_address(here):
    gym = {"version": "0.4.0", "servers": ["mcqa"], "agents": {"mcqa": [MCQA]}}
    Project(MCQA, gym=gym, gym_servers={"mcqa": {"revision": "7"}})
    assert "gym_servers.mcqa.revision is for a server elsewhere" in refusal(load_recipe, Path("recipe.yaml"))


# --- no verdict ---


def test_a_response_without_a_verdict_is_asked_about_again_and_no_other_is(here, monkeypatch):
    project = Project("own")
    monkeypatch.setenv("BREAKS", "2 Answer: A 3 Answer: B")
    assert [place for place, reward in enumerate(project.judge()) if reward is None] == [4, 9]
    project.asked()
    project.judge()
    assert {*project.asked()} - {registry.HARMLESS} == {"2 Answer: A", "3 Answer: B"}
    monkeypatch.delenv("BREAKS")
    assert None not in project.judge()
    assert project.asked() == ["2 Answer: A", "3 Answer: B"]
    assert None not in project.judge() and project.asked() == []


def test_the_next_call_asks_again_until_a_call_gains_nothing(tmp_path):
    path = tmp_path / UNJUDGED

    def calls(of: str, responses: int) -> int:
        judging.note_unjudged(path, of, responses)
        return read_record(path, LeftUnjudged)["calls"] if path.exists() else 0

    assert calls("a", 0) == 0 and not path.exists()
    assert [calls("a", left) for left in (3, 3, 3)] == [1, 1, 1], "asked once more, and then left"
    assert [calls("a", left) for left in (2, 1, 0, 0)] == [2, 3, 3, 3]
    assert [calls("a", 1), calls("b", 4), calls("b", 4)] == [4, 5, 5]


# --- NaN, and files of others ---


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("select", [{"pairs": {}}, {"best": {"min_reward": None}}])
def test_a_score_that_is_no_number_never_wins_nor_loses(place, value, select):
    source = {"kind": "generated", "by": "sft", "prompts": "p", "samples": 8, "max_new_tokens": 8}
    blend = GeneratedBlend.model_validate({"source": source, "select": select})
    scores = [float(number) for number in range(8)]
    scores[place] = value
    responses = [
        {"model": 0, "line": 1, "sample": sample, "reward": score, "score": None, "tokens": 5, "cut": False}
        | {"response": f"{sample}.", "environment": MCQA, "why": None}
        for sample, score in enumerate(scores)
    ]
    selection = Selection(blend, responses, ["c0"])
    (row,) = getattr(selection, blend.kind)({1: {"responses_create_params": {"input": "?"}}})
    finite = [sample for sample in range(8) if sample != place]
    made = row["made"].get("chosen") or row["made"]
    assert made["sample"] == finite[-1]
    assert "rejected" not in row["made"] or row["made"]["rejected"]["sample"] == finite[0]
    assert selection.left_out[NOT_FINITE] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_models_nan_is_no_verdict_and_only_nan_is_refused(here, monkeypatch, value):
    project = Project(MCQA)
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    recipe["models"] = {"judge": {"name": "some/model", "revision": "0" * 40}}
    recipe["blends"]["best"]["select"] = {"best": {"min_reward": None}, "rank": {"by": "judge"}}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    record = {"stage": "judge", "step": 1, "identity": "0" * 16, "content": "c0", "files": {}}
    Path("record.json").write_text(json.dumps(record))

    def lasting(broken: str):
        return lambda row, answers: [value if text.endswith(broken) else float(len(text)) for text in answers]

    monkeypatch.setattr(judging, "scores_by", lambda *_: lasting("B"))
    project.judge(ranker=Path("record.json"))
    table = read_table(Path("out/judged.parquet"), judging.JUDGED).to_pylist()
    assert [each["score"] is None for each in table] == [False, True, False, False] * 4
    assert table[1]["why"] == f"the reward model's score is {value}" and table[1]["reward"] == 0.0
    monkeypatch.setattr(judging, "scores_by", lambda *_: lasting(""))
    assert "judge gives none of 16 responses a finite score" in refusal(
        project.judge, store="other", ranker=Path("record.json")
    )


@pytest.mark.parametrize("kept", ["NaN", "Infinity", "-Infinity", "null", '"1"', "true", "[1]", "1, 1", ""])
def test_a_kept_verdict_that_is_no_finite_number_is_asked_for_again(here, kept):
    project = Project(MCQA)
    right = project.judge()
    (path,) = lines_kept()
    keys = {key for line in path.read_text().splitlines() for key in json.loads(line)}
    path.write_text("{" + ", ".join(f'"{key}": [{kept}]' for key in sorted(keys)) + "}\n")
    assert project.judge() == right
    assert len(lines_kept()) == 2


def strangers(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let paths be another user's: this process's number is another, and all other paths are of that number."""
    mine, real_lstat, real_fstat = os.geteuid() + 1, Path.lstat, os.fstat
    named = {(real_lstat(path).st_dev, real_lstat(path).st_ino) for path in paths}

    def turned(state: os.stat_result) -> os.stat_result:
        return state if (state.st_dev, state.st_ino) in named else os.stat_result((*state[:4], mine, *state[5:]))

    monkeypatch.setattr(os, "geteuid", lambda: mine)
    monkeypatch.setattr(Path, "lstat", lambda path: turned(real_lstat(path)))
    monkeypatch.setattr(os, "fstat", lambda descriptor: turned(real_fstat(descriptor)))


def test_verdicts_in_files_of_others_links_and_pipes_are_not_taken(here, monkeypatch):
    project = Project(MCQA)
    right = project.judge()
    (path,) = lines_kept()
    forged = path.with_name("forged.jsonl")
    forged.write_text(path.read_text().replace("[1.0]", "[0.5]"))
    path.unlink()
    (path.parent / "link.jsonl").symlink_to(forged)
    os.mkfifo(path.parent / "pipe.jsonl")
    assert 0.5 in project.judge(), "one's own file counts"
    for each in lines_kept():
        if each.name not in ("forged.jsonl", "link.jsonl", "pipe.jsonl"):
            each.unlink()
    with monkeypatch.context() as patched:
        strangers(patched, forged)
        assert project.judge() == right
        number = str(forged.stat().st_gid)
        for each in lines_kept():
            if each.name not in ("forged.jsonl", "link.jsonl", "pipe.jsonl"):
                each.unlink()
        assert 0.5 in project.judge(group=number), "the site's group is trusted"


def test_a_strangers_folder_of_answers_is_passed_over_and_two_are_refused(here, monkeypatch, capsys):
    store = Path("results/samples")
    assert folder_of_answers(store, "a") == store / "a"
    (store / "a").mkdir()
    with monkeypatch.context() as patched:
        strangers(patched, store / "a")
        own = folder_of_answers(store, "a")
        assert own == store / f"a.{os.geteuid()}"
        assert "whose answers are not taken, so all is asked again" in capsys.readouterr().err
        assert folder_of_answers(store, "a", (store / "a").stat().st_gid) == store / "a"
    own.mkdir()
    strangers(monkeypatch, store / "a", own)
    with pytest.raises(UserError, match="answers are taken only from oneself"):
        folder_of_answers(store, "a")


def test_the_store_is_made_for_who_shares_the_results(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results").chmod(0o2775)
    folder_of_answers(tmp_path / "results/samples", "a")
    assert (tmp_path / "results/samples").stat().st_mode & 0o777 == 0o775


def test_responses_and_batches_of_strangers_are_sampled_again(tmp_path, monkeypatch):
    class Engine:
        def plan(self, rows):
            return [[0]]

        def respond(self, rows, done=()):
            yield from ([{0: ("mine", 1, False)}] if 0 not in done else [])

    prompt = type("Prompt", (), {"row": {}, "line": 1})()
    (tmp_path / "batches.json").write_text("[[0], [1, 2, 3]]")
    (tmp_path / "theirs.jsonl").write_text('{"0": ["forged", 1, false]}\n')
    strangers(monkeypatch, tmp_path / "batches.json", tmp_path / "theirs.jsonl")
    rows, new = sample(Engine, [prompt], 1, (0, 1), tmp_path, "responses")
    assert [row["response"] for row in rows] == ["mine"] and new == 1
    (tmp_path / "odd.jsonl").write_text('{"0": [NaN, 1, false], "one": ["a", 1, false], "1": ["a", 1.5, false]}\n')
    monkeypatch.undo()
    assert Kept[int](tmp_path, is_response).answers[0] == ["mine", 1, False]
    assert not Kept[int](tmp_path, is_response).answers.keys() & {1}
    assert is_verdict([1]) and not is_verdict([math.nan])


# --- servers elsewhere ---


class Server(ThreadingHTTPServer):
    """A server of NeMo-Gym elsewhere, which rewards by what it is today."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.good, self.title, self.asked = "A", "server", 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"info": {"title": self.server.title}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/verify":
            self.server.asked += 1
            text = body["response"]["output"][0]["content"][0]["text"]
            self._send({"reward": float(text.endswith(self.server.good))})
        else:
            self._send({})

    def _send(self, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    running = Server()
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def by_server(server: Server, **reach: str) -> Project:
    gym = {"version": "0.4.0", "servers": ["elsewhere"], "agents": {"elsewhere": [MCQA]}}
    url = f"http://127.0.0.1:{server.server_port}"
    return Project(MCQA, gym=gym, gym_servers={"elsewhere": {"base_url": url, **reach}})


def asked_of(server: Server, project: Project) -> tuple[list[float | None], int]:
    before = server.asked
    return project.judge(), server.asked - before


def test_another_server_at_the_same_address_is_found_and_asked_about_all(here, server, capsys):
    project = by_server(server)
    assert asked_of(server, project) == ([1.0, 0.0, 1.0, 0.0] * 4, 16)
    assert asked_of(server, project) == ([1.0, 0.0, 1.0, 0.0] * 4, 8), "some are asked for again"
    server.good = "B"
    rewards, asked = asked_of(server, project)
    assert rewards == [0.0, 1.0, 0.0, 0.0] * 4 and 17 <= asked <= 24
    assert "so all its verdicts are asked for again" in capsys.readouterr().err
    assert asked_of(server, project) == ([0.0, 1.0, 0.0, 0.0] * 4, 8)
    server.title = "another release"
    assert asked_of(server, project)[1] == 16, "it describes itself otherwise"


def test_a_servers_revision_decides_where_the_recipe_names_one(here, server):
    assert asked_of(server, by_server(server, revision="1"))[1] == 16
    assert asked_of(server, by_server(server, revision="1"))[1] == 0
    assert asked_of(server, by_server(server, revision="2"))[1] == 16
