"""What NeMo-RL's vLLM server is to Gym: answers by chance, token ids in the place of tokens. PORT MODEL SECONDS."""

import json
import random
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import AutoTokenizer

TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[2])
SECONDS = float(sys.argv[3])


class Handler(BaseHTTPRequestHandler):
    """Chat completions and the tokens of a conversation."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = tokens_of(asked) if self.path.endswith("/tokenize") else answer_to(asked)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def tokens_of(asked: dict) -> dict:
    """The tokens of a conversation, as vLLM's /tokenize tells them."""
    told = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    return {"tokens": TOKENIZER.apply_chat_template(asked["messages"], **told), "max_model_len": 96}


def answer_to(asked: dict) -> dict:
    """The largest number of the question, or something else."""
    time.sleep(SECONDS)
    numbers = [int(number) for number in re.findall(r"\d+", str(asked["messages"][-1]["content"]))]
    text = random.choice([f"\\boxed{{{max(numbers, default=0)}}}", "I do not know"])
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
    shown = [{"token": f"token_id:{it}", "logprob": -1.0, "bytes": None, "top_logprobs": []} for it in ids]
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": shown}}
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
    kind = {"id": "answer", "object": "chat.completion", "created": int(time.time()), "model": asked.get("model", "")}
    return kind | {"choices": [choice], "usage": usage}


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
