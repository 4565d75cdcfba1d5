"""Are verdicts on made data believed after what they depend on has changed, and do kills of judging change any?

    python benchmarks/verdicts.py --edits --strikes 120 > benchmarks/verdicts.md
    python benchmarks/verdicts.py --edits --scripts OLD    # the same edits, judged by the scripts/ of another commit

- `--edits`: 40 responses are judged, something is edited, and they are judged again with the same store. The table
  counts the verdicts that differ from those of a store without earlier calls, which an edit must not leave behind.
- `--strikes`: judging is killed by SIGKILL at random times, or just before its n-th change of a file, and started again
  until it ends; verdicts must be those of an undisturbed call, to the byte, and no temporary file may lie there.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import ROOT, command_line, head, row
from scripts.sampling.sample import RESPONSES

PROMPTS, SAMPLES = 10, 4
STRUCK_PROMPTS, STRUCK_SECONDS = 160, 0.004
"""Prompts of the struck calls, and how long the environment thinks about a response."""
MCQA, OWN = "mcqa_simple_agent", "parity"
RECIPE = """
name: verdicts
seed: 1
source: {{kind: synthetic, seed: 3}}
model: {{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}}
environments: {{parity: parity.py}}
blends:
  sft: {{kind: demonstrations, rows: 1000, environments: [mcqa_simple_agent]}}
  prompts: {{source: {{kind: folder, path: rows}}, environments: [{environment}]}}
  best:
    source:
      kind: generated
      by: sft
      prompts: prompts
      samples: 4
      max_new_tokens: 24
{gym}
    select: {{best: {{min_reward: 0.0}}}}
stages:
  sft:
    algorithm: sft
    blend: sft
    sft: {{max_num_steps: 1}}
    policy: {{max_total_sequence_length: 64, train_global_batch_size: 4, optimizer: {{lr: 1.0e-3}}}}
"""
GYM = """      gym: {{version: "0.4.0", servers: [elsewhere], agents: {{elsewhere: [mcqa_simple_agent]}}}}
      gym_servers: {{elsewhere: {{base_url: "{url}"}}}}"""
ENVIRONMENT = """import json
import time
from pathlib import Path

from helper import is_good


def verify(row, response):
    time.sleep(row.get("seconds", 0))
    bound = json.loads(Path("bound.json").read_text())
    return float(is_good(response) and len(response) > bound)
"""
HELPER = """def is_good(response):
    return sum(response.encode()) % 2 == 0
"""
STRIKER = """
import json, os, signal, sys, time
from pathlib import Path
from scripts.sampling import judge as judging

def judge(asked):
    left = asked["at"]
    def strike(event, arguments):
        nonlocal left
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write and not isinstance(arguments[0], int) or event in ("os.rename", "os.mkdir", "os.link", "os.remove"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    if left is not None:
        sys.addaudithook(strike)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    judging.main(recipe=Path("recipe.yaml"), blend="best", prompts=Path("data/prompts/train-split.jsonl"),
                 responses=[Path("responses.parquet")], store=Path(asked["store"]), output=Path(asked["output"]))

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            judge(asked)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    if asked["after"] is not None:
        time.sleep(asked["after"])
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Answering(BaseHTTPRequestHandler):
    """Answers as a server of NeMo-Gym: a session, a reward, and the description of itself."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Describe the server."""
        self._send({"openapi": "3.1.0", "info": {"title": "server"}, "paths": {"/verify": {}}})

    def do_POST(self) -> None:
        """Begin a session, or reward a response by its bytes."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/verify":
            text = asked["response"]["output"][0]["content"][0]["text"]
            is_even = sum(text.encode()) % 2 == 0
            self._send({"reward": float(is_even != self.server.is_turned)})
        else:
            self._send({})

    def _send(self, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[ThreadingHTTPServer]:
    """Run a server that rewards; `is_turned` makes it another one, which rewards the other responses."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.is_turned, server.daemon_threads = False, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()


class Project:
    """A folder with a copy of scripts/, a recipe, prompts and responses to them, which judging turns into verdicts."""

    def __init__(
        self, folder: Path, scripts: Path, environment: str, url: str | None, prompts: int, seconds: float
    ) -> None:
        self.folder = folder
        shutil.copytree(scripts, folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("config", "envs", "demo"):
            shutil.copytree(scripts.with_name(name), folder / name)
        gym = GYM.format(url=url) if url else ""
        self.write("recipe.yaml", RECIPE.format(environment=environment, gym=gym))
        self.write("parity.py", ENVIRONMENT)
        self.write("helper.py", HELPER)
        self.write("bound.json", "3")
        self.rows = [
            {
                "agent_ref": {"type": "responses_api_agents", "name": environment},
                "responses_create_params": {"input": [{"role": "user", "content": f"question {number}\nA: a\nB: b"}]},
                "options": [{"A": "a"}, {"B": "b"}],
                "grading_mode": "lenient_answer_colon",
                "expected_answer": "AB"[number % 2],
                "seconds": seconds,
            }
            for number in range(prompts)
        ]
        self.write_rows()
        responses = [
            {"model": 0, "line": line, "sample": sample, "response": text, "tokens": 5, "cut": False}
            for line in range(1, prompts + 1)
            for sample, text in enumerate(("Answer: A", "Answer: B", "So. Answer: A", "So. Answer: B"))
        ]
        pq.write_table(pa.Table.from_pylist(responses, schema=RESPONSES), folder / "responses.parquet")

    def write(self, name: str, text: str) -> None:
        """Write a file of the project."""
        (self.folder / name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        """Edit a file of the project."""
        text = (self.folder / name).read_text()
        if old not in text:
            sys.exit(f"{name} has no {old!r}")
        self.write(name, text.replace(old, new))

    def write_rows(self) -> None:
        """Write the training split of the prompts."""
        (self.folder / "data/prompts").mkdir(parents=True, exist_ok=True)
        self.write("data/prompts/train-split.jsonl", "".join(json.dumps(each) + "\n" for each in self.rows))

    def command(self, store: str, output: str) -> list[str]:
        """Return the words of judging, behind the program's name."""
        options = {"recipe": "recipe.yaml", "blend": "best", "prompts": "data/prompts/train-split.jsonl"}
        options |= {"responses": "responses.parquet", "store": store, "output": output}
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def judge(self, store: str) -> list[tuple[float | None, str | None]]:
        """Judge the responses; return rewards and reasons of no verdict."""
        words = [sys.executable, "-m", "scripts.sampling.judge", *self.command(store, "out/judged.parquet")]
        done = subprocess.run(words, cwd=self.folder, text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        table = pq.read_table(self.folder / "out/judged.parquet")
        return list(zip(table["reward"].to_pylist(), table["why"].to_pylist(), strict=True))


@dataclass
class Edit:
    """An edit of what verdicts depend on, in a project of an environment."""

    says: str
    environment: str
    make: Callable[[Project, ThreadingHTTPServer], None]
    is_by_gym: bool = False


def turn_gold(project: Project, _: ThreadingHTTPServer) -> None:
    """Swap the gold answers."""
    for each in project.rows:
        each["expected_answer"] = {"A": "B", "B": "A"}[each["expected_answer"]]
    project.write_rows()


def turn_verifier(project: Project, _: ThreadingHTTPServer) -> None:
    """Let the shipped verifier reward the other responses."""
    project.replace("scripts/rewards/environments/mcqa.py", "float(chosen is not None", "float(not(chosen is not None")
    project.replace(
        "scripts/rewards/environments/mcqa.py",
        'row["expected_answer"].strip().upper())',
        "row['expected_answer'].strip().upper()))",
    )


def turn_server(_: Project, server: ThreadingHTTPServer) -> None:
    """Let another server answer at the same address."""
    server.is_turned = not server.is_turned


EDITS = (
    Edit("gold answers", MCQA, turn_gold),
    Edit("the shipped verifier", MCQA, turn_verifier),
    Edit("the environment's own file", OWN, lambda project, _: project.replace("parity.py", "> bound", "< bound")),
    Edit("a module that it imports", OWN, lambda project, _: project.replace("helper.py", "% 2 == 0", "% 2 == 1")),
    Edit("a file of settings that it reads", OWN, lambda project, _: project.write("bound.json", "10")),
    Edit("the server at the same address", MCQA, turn_server, is_by_gym=True),
    Edit(
        "settings: thoughts are marked otherwise",
        OWN,
        lambda project, _: project.replace(
            "recipe.yaml", "num_key_value_heads: 1}", 'num_key_value_heads: 1, thoughts: {begin: Answer, end: ":"}}'
        ),
    ),
)


def wrong_after(edit: Edit, scripts: Path, url: str, server: ThreadingHTTPServer) -> tuple[int, int, int]:
    """Return the verdicts, those that the edit changes, and those that are wrong after it."""
    with tempfile.TemporaryDirectory() as folder:
        project = Project(
            Path(folder, "project"), scripts, edit.environment, url if edit.is_by_gym else None, PROMPTS, 0.0
        )
        before = project.judge("store")
        edit.make(project, server)
        after, right = project.judge("store"), project.judge("fresh")
        changed = sum(old != new for old, new in zip(before, right, strict=True))
        return len(right), changed, sum(old != new for old, new in zip(after, right, strict=True))


class Striker:
    """A process that has imported the judging program, and starts it by fork: a start costs no imports."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-c", STRIKER]
        self._process = subprocess.Popen(words, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def judge(self, store: str, output: str, at: int | None = None, after: float | None = None) -> int:
        """Judge, killed just before the change of a file number `at`, or `after` seconds; return the exit code."""
        asked = {"store": store, "output": output, "at": at, "after": after}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def struck(strikes: int, seed: int) -> tuple[int, int, int]:
    """Strike judging; return the strikes, the calls that ended otherwise, and the temporary files that were left."""
    random.seed(seed)
    done = differing = left_over = 0
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder, "project"), ROOT / "scripts", OWN, None, STRUCK_PROMPTS, STRUCK_SECONDS)
        striker = Striker(project.folder)
        if striker.judge("whole", "whole/judged.parquet"):
            sys.exit("judging fails without a strike")
        whole = (project.folder / "whole/judged.parquet").read_bytes()
        seconds = 1.3 * STRUCK_PROMPTS * SAMPLES * STRUCK_SECONDS
        for number in count():
            if done >= strikes:
                break
            output = f"struck{number}/judged.parquet"
            status = -9
            while status == -9:
                is_by_file = random.random() < 0.5
                at = random.randint(1, 12) if is_by_file else None
                after = None if is_by_file or done >= strikes else random.uniform(0.1, 1.0) * seconds
                status = striker.judge(f"store{number}", output, at, after)
                done += status == -9
            if status:
                sys.exit(f"judging ended with {status}")
            made = (project.folder / output).parent
            differing += (made / "judged.parquet").read_bytes() != whole
            left_over += sum(path.name.startswith(".") for path in made.iterdir())
            print(f"{done} of {strikes} strikes, {differing} differ, {left_over} left over", file=sys.stderr)
        striker.end()
    return done, differing, left_over


def main() -> None:
    """Print the tables; status 1 where a verdict is wrong."""
    parser = command_line(__doc__)
    parser.add_argument("--edits", action="store_true")
    parser.add_argument("--strikes", type=int, default=0)
    parser.add_argument("--scripts", type=Path, default=ROOT / "scripts", help="the folder whose code judges the edits")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    edits = EDITS if arguments.edits else EDITS[:1] if arguments.smoke else ()
    missed = False
    print(f"Made by `python {' '.join(sys.argv)}`, 2 CPU cores.\n")
    if edits:
        print(head("edit", "verdicts", "changed by it", "wrong after it"))
    with serving() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        for edit in edits:
            verdicts, changed, wrong = wrong_after(edit, arguments.scripts.resolve(), url, server)
            missed |= wrong > 0
            print(row(edit.says, verdicts, changed, wrong), flush=True)
    if arguments.strikes:
        done, differing, left_over = struck(arguments.strikes, arguments.seed)
        missed |= differing + left_over > 0
        print(
            f"\n{done} strikes by SIGKILL on judging: {differing} files differ, {left_over} temporary files are left."
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
