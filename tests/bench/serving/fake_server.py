"""A small server with OpenAI's interface that answers as it is told to."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """# HELP fake:spec_decode_num_drafts_total Rounds.
# TYPE fake:spec_decode_num_drafts_total counter
fake:spec_decode_num_drafts_total{{model="a"}} {rounds}
fake:spec_decode_num_drafts_created{{model="a"}} 1.7e+09
fake:spec_decode_num_draft_tokens_total{{model="a"}} {drafted}
fake:spec_decode_num_accepted_tokens_total {accepted}
fake:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}
fake:spec_decode_num_accepted_tokens_per_pos_total{{model="a",position="1"}} {second}
fake:num_requests_running 3
"""


class FakeServer:
    """What the server does, and what it was asked.

    Attributes:
        pieces: texts of an answer.
        delay_s: before each piece.
        behave: called with the number of the request (from 0, warm-ups included); names a failure, or None.
        usage: whether tokens are counted in the answer.
        metrics: whether there is a page of them.
    """

    def __init__(self, pieces=("one ", "two ", "three"), delay_s=0.0, behave=lambda number: None):
        self.pieces = pieces
        self.delay_s = delay_s
        self.behave = behave
        self.usage = True
        self.metrics = True
        self.bodies = []
        self.keys = []
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.url = ""

    def rounds(self):
        return len(self.bodies)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    @property
    def fake(self):
        return self.server.fake

    def do_GET(self):
        if self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": "fake-model"}]}))
        elif self.path == "/metrics" and self.fake.metrics:
            n = self.fake.rounds()
            self._send(200, METRICS.format(rounds=n, drafted=4 * n, accepted=3 * n, first=2 * n, second=n))
        else:
            self._send(404, "{}")

    def do_POST(self):
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            number = len(fake.bodies)
            fake.bodies.append((self.path, body))
            fake.keys.append(self.headers.get("Authorization"))
            fake.num_open += 1
            fake.most_open = max(fake.most_open, fake.num_open)
        try:
            self._answer(fake.behave(number), body)
        except BrokenPipeError:
            pass
        finally:
            with fake.lock:
                fake.num_open -= 1

    def _answer(self, failure, body):
        fake = self.fake
        if isinstance(failure, int):
            self._send(failure, json.dumps({"error": {"message": "too\nmany", "type": "x"}}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if failure == "hang":
            self.fake.released.wait(30)
            return
        if failure == "malformed":
            self._write("data: {not json}")
            return
        is_chat = "messages" in body
        for index, piece in enumerate(fake.pieces):
            time.sleep(fake.delay_s)
            if failure == "cut" and index == 1:
                return
            if failure == "error" and index == 1:
                self._event({"error": {"message": "out of memory"}})
                return
            self._event({"choices": [{"index": 0, **({"delta": {"content": piece}} if is_chat else {"text": piece})}]})
        end = {"delta": {}} if is_chat else {"text": ""}
        self._event({"choices": [{"index": 0, **end, "finish_reason": "stop"}]})
        if fake.usage:
            count = {"prompt_tokens": 7, "completion_tokens": 2 * len(fake.pieces)}
            self._event({"choices": [], "usage": count})
        self._write("data: [DONE]")

    def _event(self, event):
        self._write("data: " + json.dumps(event))

    def _write(self, text):
        self.wfile.write(text.encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(fake):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.fake = fake
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        server.server_close()
