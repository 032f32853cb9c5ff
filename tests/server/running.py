"""Servers on a free port of this machine, in a thread of the test's process or in a process of their own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sparkgap.api import LLM
from sparkgap.errors import SparkgapError
from sparkgap.server.listener import bind
from sparkgap.server.run import ServerProcess
from sparkgap.server.settings import ServerSettings

ENGINE = {"dtype": "float32", "threads": 1, "device": "cpu", "max_num_seqs": 4}
"""Settings of all tiny models in these tests."""


def wait_until(condition, timeout_s=20.0):
    """Wait until `condition()` is true; its value. Fails the test when that does not happen."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return value


class Running:
    """A server in a thread."""

    def __init__(self, load, **settings):
        self.settings = ServerSettings(**{"port": 0, "log_level": "warning"} | settings)
        listener = bind(self.settings)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = ServerProcess(self.settings, listener, load)
        self.error = None
        # Making a client reads certificates, and a connection that is kept counts as one.
        self.client = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.process.state is not None)

    def _run(self):
        try:
            self.process.serve()
        except SparkgapError as error:
            self.error = error

    @property
    def state(self):
        return self.process.state

    @property
    def llm(self):
        return self.process.state.llm

    def is_idle(self):
        stats = self.llm.stats
        return self.llm.num_unfinished_seqs == stats.num_requests == stats.num_used_blocks == 0

    def post(self, path, body, **options):
        return self.client.post(self.url + path, json=body, **options)

    def get(self, path, **options):
        return self.client.get(self.url + path, **options)

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return connection

    def metric(self, name, **labels):
        """The value of one sample of `/metrics`; 0 for labels that have not occurred yet."""
        wanted = f"sparkgap:{name}"
        if labels:
            wanted += "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"
        lines = self.get("/metrics").text.splitlines()
        assert any(line.startswith(f"# TYPE sparkgap:{name.removesuffix('_total')}") for line in lines)
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == wanted), 0.0)

    def stop(self):
        self.process.stop()
        self._thread.join(30)
        self.client.close()
        assert not self._thread.is_alive()


@contextmanager
def running(model: Path | str, *, wait=True, speculative_config=None, engine=None, **settings) -> Iterator[Running]:
    """A server of a model directory, ready to serve."""

    def load():
        return LLM(str(model), **(ENGINE | (engine or {})), speculative_config=speculative_config)

    server = Running(load, **{"served_model_name": "tiny"} | settings)
    try:
        if wait:
            wait_until(lambda: server.error or server.get("/health").status_code == 200)
            assert server.error is None
        yield server
    finally:
        server.stop()


class Process:
    """`sparkgap serve` as a process."""

    def __init__(self, *arguments, port=0, environment=None, wait=True):
        command = [sys.executable, "-m", "sparkgap", "serve", "--port", str(port), *map(str, arguments)]
        self.child = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {}), bufsize=1
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = port
        if wait:
            try:
                line = wait_until(lambda: self.find("ready url") or self.child.poll() is not None, 180)
                assert isinstance(line, str), self.lines
            except BaseException:
                self.kill()
                raise
            self.port = int(re.search(r"url=http://127\.0\.0\.1:(\d+)", line)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self):
        for line in self.child.stderr:
            self.lines.append(line)

    def find(self, text):
        return next((line for line in self.lines if text in line), None)

    def send(self, number):
        self.child.send_signal(number)

    def wait(self, timeout_s=30):
        status = self.child.wait(timeout_s)
        self._reader.join(5)
        return status

    def kill(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)


def events(text: str) -> list:
    """The objects of a stream of server-sent events, without the last, which must be `[DONE]`."""
    *objects, last, empty = text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert all(item.startswith("data: ") for item in objects)
    return [json.loads(item.removeprefix("data: ")) for item in objects]


def check_error(response, status, *, type="invalid_request_error", code=..., param=...):
    """Check that a response is an error of OpenAI's form; its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == type
    assert body["error"]["code"]
    if code is not ...:
        assert body["error"]["code"] == code
    if param is not ...:
        assert body["error"]["param"] == param
    assert body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]
