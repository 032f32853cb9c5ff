"""`sparkgap serve` as a process: signals under load, and the port after each end."""

import json
import signal
import threading
import time

import httpx
import pytest

from sparkgap import SamplingParams

from .running import Process, check_error, wait_until

BODY = {"prompt": "ab", "temperature": 0, "max_tokens": 30}
LOAD = {"prompt": "x", "seed": 1, "max_tokens": 110, "ignore_eos": True, "n": 60, "stream": True}


def load(url, begun, results):
    """A client that reads a stream of many choices as far as it goes; its texts by choice, and whether it ended."""
    texts, is_done = {}, False
    try:
        with httpx.stream("POST", url + "/v1/completions", json=LOAD, timeout=60) as answer:
            for line in answer.iter_lines():
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    begun.set()
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    except httpx.HTTPError:
        pass
    results.append((texts, is_done))


def under_load(server, clients_begun=1):
    """Two clients, at least so many of whose streams have begun; a function that gives their results."""
    results = []
    begun = [threading.Event() for _ in range(2)]
    threads = [threading.Thread(target=load, args=(server.url, event, results)) for event in begun]
    for thread in threads:
        thread.start()
    metric = "sparkgap:generation_tokens_total "

    def has_begun():
        text = httpx.get(server.url + "/metrics").text
        return any(line.startswith(metric) and float(line.split()[1]) > 50 for line in text.splitlines())

    wait_until(lambda: sum(event.is_set() for event in begun) >= clients_begun and has_begun())

    def finish():
        for thread in threads:
            thread.join(60)
        return results

    return finish


@pytest.fixture(scope="module")
def start(pair, llm, tmp_path_factory):
    """Starts a server that answers as the model in this process does."""
    model, drafter = pair
    settings = tmp_path_factory.mktemp("settings") / "serve.toml"
    settings.write_text(f'model = "{model}"\nserved-model-name = "tiny"\ndtype = "float32"\nmax-num-seqs = 4\n')
    (expected,) = llm.generate(["ab"], SamplingParams(temperature=0, max_tokens=30))
    started = []

    def start(port=0, wait=True):
        options = ("--config", settings, "--threads", 1, "--draft", drafter, "--device", "cpu")
        server = Process(*options, port=port, wait=wait)
        started.append(server)
        if wait:
            answer = httpx.post(server.url + "/v1/completions", json=BODY, timeout=30).json()
            assert answer["choices"][0]["text"] == expected.outputs[0].text
            assert answer["model"] == "tiny"
        return server

    yield start
    for server in started:
        server.kill()


def test_a_killed_server_starts_again_on_its_port_and_a_signal_lets_it_finish(start, llm):
    server = start()
    port = server.port
    # The port is in use: one line, before anything is loaded.
    other = start(port, wait=False)
    assert other.wait() == 2
    assert other.lines == [
        f"sparkgap: error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host\n"
    ]
    finish = under_load(server)
    server.send(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert not any(is_done for _, is_done in finish())
    server = start(port)
    finish = under_load(server, clients_begun=2)
    server.send(signal.SIGTERM)
    wait_until(lambda: server.find("draining"))
    check_error(httpx.post(server.url + "/v1/completions", json=BODY), 503, type="server_error")
    assert httpx.get(server.url + "/health").json()["status"] == "draining"
    results = finish()
    assert server.wait() == 0
    assert server.find("stopped")
    (whole,) = llm.generate(["x"], SamplingParams(seed=1, max_tokens=110, ignore_eos=True, n=60))
    texts = {output.index: output.text for output in whole.outputs}
    assert results == [(texts, True), (texts, True)]


@pytest.mark.slow
def test_a_second_signal_stops_at_once(start):
    server = start()
    finish = under_load(server)
    server.send(signal.SIGTERM)
    wait_until(lambda: server.find("draining"))
    begun = time.monotonic()
    server.send(signal.SIGTERM)
    assert server.wait() == -signal.SIGTERM
    assert time.monotonic() - begun < 5
    assert not any(is_done for _, is_done in finish())
    assert start(server.port)
