"""What fresh processes get for the first responses that NeMo-Gym judges, asked at once by threads.

    python benchmarks/first_verdicts.py [--real] [--processes 200] [--root FOLDER]

Every process asks a server at `base_url` for eight verdicts at once, its first. All eight are worth 1. The server is a
double that answers after some milliseconds, or, with `--real`, NeMo-Gym's own server of multiple choice. `--own` lets
every process start a server of its own instead. `--root` names the tree whose code is asked, as one of an earlier
commit. The output is one line of counts, and the first messages.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line

VERSION = "0.4.0"
RESPONSES = 8
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from scripts.errors import UserError
from scripts.recipe.gym_release import Gym, GymServer
from scripts.rewards.registry import register_gym, reward_groups
from scripts.rewards.verdict import Unjudged

asked = json.load(sys.stdin)
gym = Gym(version=asked["version"], servers=["mcqa"], agents={"mcqa": ["mcqa_simple_agent"]})
register_gym(gym, {"mcqa": GymServer(base_url=asked["url"])}, asked["python"])
try:
    (rewards,) = reward_groups([(asked["row"], asked["responses"])], ["rows.jsonl:1"])
except UserError as error:
    print(json.dumps({"ended": str(error)}))
else:
    whys = [reward.why for reward in rewards if isinstance(reward, Unjudged)]
    print(json.dumps({"rewards": rewards, "whys": whys}))
"""
REAL = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from scripts.rewards.gym_application import ROOT, application, make_server
import uvicorn
from omegaconf import OmegaConf

parts = OmegaConf.load(ROOT / "resources_servers/mcqa/configs/mcqa.yaml").values()
config = next(part.resources_servers.mcqa for part in parts if "mcqa" in part.get("resources_servers", ()))
server = make_server("mcqa", OmegaConf.to_container(config, resolve=True))
app = application(server, "mcqa")
server.setup_exception_middleware(app)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning")
"""
ROW = {
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    "responses_create_params": {"input": [{"role": "user", "content": "Which?"}]},
    "options": [{"A": "one"}, {"B": "two"}],
    "expected_answer": "B",
    "grading_mode": "strict_single_letter_boxed",
}


class Double(BaseHTTPRequestHandler):
    """A server of Gym that pays 1 for every response, after some milliseconds."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a request."""
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.005)
        body = b"{}" if self.path == "/seed_session" else b'{"reward": 1.0}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class QuietServer(ThreadingHTTPServer):
    """A server that says nothing of callers who are gone."""

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def double() -> Iterator[str]:
    """Serve the double in a thread; its address."""
    server = QuietServer(("127.0.0.1", 0), Double)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@contextmanager
def real(python: Path) -> Iterator[str]:
    """Serve NeMo-Gym's own server of multiple choice; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Double) as taken:
        port = taken.server_address[1]
    process = subprocess.Popen([python, "-P", "-c", REAL, ROOT, str(port)], stdin=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(port: int) -> None:
    """Wait until something listens on a port."""
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    sys.exit("the server did not start")


def ask(url: str | None, root: Path, python: Path) -> dict:
    """Ask from a fresh process for eight verdicts; what it got."""
    responses = [f"{'word ' * number}\\boxed{{B}}" for number in range(RESPONSES)]
    asked = {"url": url, "version": VERSION, "row": ROW, "responses": responses, "python": str(python)}
    command = [sys.executable, "-c", CHILD, str(root)]
    done = subprocess.run(command, cwd=root, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"ended": done.stderr[-300:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Count the verdicts."""
    parser = command_line(__doc__)
    parser.add_argument("--real", action="store_true", help="ask NeMo-Gym's own server")
    parser.add_argument("--own", action="store_true", help="let each process start a server of its own")
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-gym/bin/python")
    options = parser.parse_args()
    count = 2 if options.smoke else options.processes
    os.environ["OMP_NUM_THREADS"] = "1"
    seen, messages = Counter(), Counter()
    served = real(options.python) if options.real else double()
    with served as url:
        for _ in range(count):
            got = ask(None if options.own else url, options.root, options.python)
            if "ended" in got:
                seen["processes that ended"] += 1
                messages[got["ended"][:300]] += 1
                continue
            wrong = sum(reward != 1.0 for reward in got["rewards"])
            seen["right"] += RESPONSES - wrong
            seen["wrong"] += wrong
            seen["wrong without a word"] += wrong - len(got["whys"])
            seen["processes with a wrong verdict"] += bool(wrong)
            messages.update(why[:300] for why in got["whys"])
    print(f"{count} processes of {RESPONSES} responses:", ", ".join(f"{key} {value}" for key, value in seen.items()))
    for message, times in messages.most_common(5):
        print(f"{times} times: {message}")


if __name__ == "__main__":
    main()
