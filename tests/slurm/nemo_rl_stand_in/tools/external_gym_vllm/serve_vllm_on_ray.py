"""A stand-in for a replica of a judge: vLLM's addresses, and a made-up verdict."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    """Serve until killed; arguments of vLLM's that this does not know are printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    told, others = parser.parse_known_args()
    print(f"serving {told.model} as {told.served_model_name}, told {' '.join(others)}", flush=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"object": "list", "data": [{"id": told.served_model_name, "object": "model"}]}
            self.answer({"/health": {}, "/v1/models": models}.get(self.path))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path == "/v1/chat/completions" and asked["model"] == told.served_model_name
            verdict = {"choices": [{"message": {"role": "assistant", "content": "0.5"}, "finish_reason": "stop"}]}
            self.answer(verdict if known else None)

        def answer(self, said: dict | None) -> None:
            body = json.dumps(said).encode()
            self.send_response(404 if said is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            print(self.requestline, flush=True)

    ThreadingHTTPServer(("", told.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
