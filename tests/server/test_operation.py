"""Health, limits, metrics, logs and the end of a server."""

import json
import re
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparkgap.api import LLM
from sparkgap.errors import ConfigError
from sparkgap.server.listener import bind
from sparkgap.server.logs import configure_logging
from sparkgap.server.settings import ServerSettings

from .running import ENGINE, Running, check_error, events, running, wait_until

BODY = {"prompt": "ab", "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "ab", "temperature": 0, "max_tokens": 110, "ignore_eos": True}


class Slow:
    """Holds an engine's steps back until told otherwise."""

    def __init__(self, server):
        self._go_on = threading.Event()
        engine = server.llm._engine
        step = engine.step

        def slow():
            self._go_on.wait(30)
            return step()

        engine.step = slow

    def release(self):
        self._go_on.set()


@pytest.fixture
def in_background():
    """Runs functions in threads; their results."""
    threads = []

    def start(function, *arguments, **options):
        result = []
        thread = threading.Thread(target=lambda: result.append(function(*arguments, **options)))
        thread.start()
        threads.append(thread)

        def get():
            thread.join(40)
            return result[0]

        return get

    yield start
    for thread in threads:
        thread.join(40)


def test_health_while_loading_ready_and_draining(pair, in_background):
    loading = threading.Event()

    def load():
        loading.wait(30)
        return LLM(str(pair[0]), **ENGINE)

    server = Running(load)
    try:
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert check_error(server.post("/v1/completions", BODY), 503, type="server_error", code="loading")
        check_error(server.get("/v1/models"), 503, type="server_error")
        assert server.metric("healthy") == 0
        assert server.get("/version").status_code == 200
        loading.set()
        wait_until(lambda: server.get("/health").status_code == 200)
        assert server.metric("healthy") == 1
        slow = Slow(server)
        running_request = in_background(server.post, "/v1/completions", LONG)
        streamed = in_background(server.post, "/v1/completions", LONG | {"stream": True})
        wait_until(lambda: server.llm.num_unfinished_seqs == 2)
        server.process.stop()
        wait_until(lambda: server.get("/health").json()["status"] == "draining")
        refused = server.post("/v1/completions", BODY)
        check_error(refused, 503, type="server_error", code="shutting_down")
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        slow.release()
        whole = running_request()
        assert whole.status_code == 200
        assert whole.json()["usage"]["completion_tokens"] == 110
        pieces = events(streamed().text)
        assert "".join(p["choices"][0]["text"] for p in pieces) == whole.json()["choices"][0]["text"]
    finally:
        loading.set()
        server.stop()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    server = Running(lambda: LLM(str(tmp_path / "none"), **ENGINE))
    wait_until(lambda: server.error)
    assert "none" in str(server.error)
    server.stop()


def test_the_end_of_a_server_that_still_loads(pair):
    go_on = threading.Event()

    def load():
        go_on.wait(30)
        raise RuntimeError("nobody is to see this")

    server = Running(load)
    server.stop()
    assert server.error is None
    go_on.set()


def test_draining_has_an_end(pair, in_background, capfd):
    with running(pair[0], drain_timeout_s=0.3) as server:
        slow = Slow(server)
        answer = in_background(server.post, "/v1/completions", LONG)
        wait_until(lambda: server.llm.num_unfinished_seqs == 1)
        started = time.monotonic()
        server.process.stop()
        wait_until(lambda: server.process.state.llm._thread._is_stopping)
        assert time.monotonic() - started < 15
        check_error(answer(), 503, type="server_error", code="shutting_down")
        slow.release()
    # That is no failure of the server's: the log shows no traceback.
    assert "Traceback" not in capfd.readouterr().err


def test_a_deadline_of_the_request_ends_it_with_what_it_has(pair, in_background):
    with running(pair[0]) as server:
        slow = Slow(server)
        answer = in_background(server.post, "/v1/completions", LONG | {"deadline_s": 0.2})
        wait_until(lambda: server.llm.num_unfinished_seqs == 1)
        time.sleep(0.3)
        slow.release()
        (choice,) = answer().json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "timeout")
        whole = server.post("/v1/completions", BODY | {"deadline_s": 60}).json()["choices"]
        assert whole == server.post("/v1/completions", BODY).json()["choices"]
        wait_until(server.is_idle)


def test_a_hanging_engine_does_not_look_well(pair, in_background):
    with running(pair[0], stall_timeout_s=0.2) as server:
        slow = Slow(server)
        time.sleep(0.3)
        assert server.get("/health").status_code == 200
        answer = in_background(server.post, "/v1/completions", BODY)
        wait_until(lambda: server.get("/health").json()["status"] == "stalled")
        assert server.metric("healthy") == 0
        assert server.metric("num_requests_running") == 0
        slow.release()
        assert answer().status_code == 200
        wait_until(lambda: server.get("/health").status_code == 200)


def test_an_engine_that_dies_fails_requests_and_health(pair, in_background):
    with running(pair[0], log_level="error") as server:
        slow = Slow(server)
        answers = [in_background(server.post, "/v1/completions", LONG | {"stream": s}) for s in (False, True)]
        wait_until(lambda: server.llm.num_unfinished_seqs == 2)
        server.llm._engine.scheduler.schedule = lambda *_: 1 / 0
        slow.release()
        for answer in answers:
            check_error(answer(), 500, type="server_error", code="engine_error")
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "ZeroDivisionError" in health.json()["detail"]
        check_error(
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            500,
            type="server_error",
        )
        assert server.get("/metrics").status_code == 200


def test_a_request_that_fails_in_computing_fails_alone(pair):
    with running(pair[0], log_level="error", engine={"graphs": "off"}) as server:
        expected = server.post("/v1/completions", BODY).json()["choices"]
        runner = server.llm._engine.runner
        decode, number = runner.decode, iter(range(100))

        def broken(sequences):
            if next(number) < 3:
                return decode(sequences)
            raise MemoryError("no memory")

        runner.decode = broken
        pieces = server.post("/v1/completions", BODY | {"stream": True})
        assert pieces.status_code == 200
        *_, last = events(pieces.text)
        assert last["error"]["type"] == "server_error"
        assert "no memory" in last["error"]["message"]
        check_error(server.post("/v1/completions", BODY), 500, type="server_error", code="engine_error")
        assert server.metric("request_failure_total") == 2
        runner.decode = decode
        assert server.post("/v1/completions", BODY).json()["choices"] == expected
        assert server.get("/health").status_code == 200
        assert server.is_idle()


def test_an_unforeseen_error_is_no_secret_and_no_end(pair, monkeypatch):
    with running(pair[0], log_level="error") as server:
        monkeypatch.setattr(server.llm, "encode", lambda *a, **k: 1 / 0)
        message = check_error(
            server.post("/tokenize", {"prompt": "x"}), 500, type="server_error", code="internal_error"
        )
        assert "division" not in message
        monkeypatch.undo()
        assert server.post("/tokenize", {"prompt": "x"}).status_code == 200


def test_the_queue_is_bounded(pair, in_background):
    with running(pair[0], max_queued_seqs=3, engine={"max_num_seqs": 2}) as server:
        slow = Slow(server)
        answers = [in_background(server.post, "/v1/completions", BODY) for _ in range(3)]
        wait_until(lambda: server.llm.num_unfinished_seqs == 3)
        # Two more fit; a request that asks for three gets none.
        refused = server.post("/v1/completions", BODY | {"prompt": ["a", "b", "c"]})
        check_error(refused, 429, type="rate_limit_error", code="queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        answers.append(in_background(server.post, "/v1/completions", BODY | {"n": 2}))
        wait_until(lambda: server.llm.num_unfinished_seqs == 5)
        check_error(server.post("/v1/completions", BODY | {"stream": True}), 429, type="rate_limit_error")
        never = server.post("/v1/completions", BODY | {"n": 6})
        check_error(never, 400, code="too_many_completions")
        slow.release()
        assert [answer().status_code for answer in answers] == [200] * 4
        assert server.post("/v1/completions", BODY).status_code == 200


def test_requests_have_a_deadline(pair, in_background):
    with running(pair[0], request_timeout_s=0.3, engine={"graphs": "off"}) as server:
        slow = Slow(server)
        answers = [in_background(server.post, "/v1/completions", LONG | {"stream": s}) for s in (False, True)]
        for answer in answers:
            check_error(answer(), 504, type="server_error", code="request_timeout")
        slow.release()
        wait_until(server.is_idle)
        decode = server.llm._engine.runner.decode

        def slower(sequences):
            time.sleep(0.05)
            return decode(sequences)

        server.llm._engine.runner.decode = slower
        *pieces, last = events(server.post("/v1/completions", LONG | {"stream": True}).text)
        assert last["error"]["code"] == "request_timeout"
        assert pieces
        wait_until(server.is_idle)


def test_prompts_have_a_limit(pair):
    with running(pair[0], max_prompt_tokens=10) as server:
        assert server.post("/v1/completions", BODY | {"prompt": [1] * 10}).status_code == 200
        message = check_error(
            server.post("/v1/completions", BODY | {"prompt": [1] * 11}), 400, code="context_length_exceeded"
        )
        assert "10" in message


def test_metrics_count(pair):
    model, drafter = pair
    with running(model, speculative_config={"model": str(drafter)}) as server:
        server.post("/v1/completions", BODY | {"prompt": ["abc", "de"], "ignore_eos": True})
        text = server.post("/v1/completions", BODY | {"stream": True, "stop": "\0\0", "ignore_eos": True}).text
        # An answer may arrive before its surplus round ends and before its exchange is counted.
        wait_until(server.is_idle)
        answered = {"method": "POST", "handler": "/v1/completions", "status": "200"}
        wait_until(lambda: server.metric("http_requests_total", **answered) == 2)
        families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").text)}
        samples = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}

        def value(name, **labels):
            return samples[("sparkgap:" + name, *sorted(labels.items()))]

        assert value("prompt_tokens_total") == 7
        assert value("generation_tokens_total") == 36
        assert value("request_success_total", finished_reason="length") == 3
        assert value("time_to_first_token_seconds_count") == 3
        assert value("e2e_request_latency_seconds_count") == 3
        assert value("request_time_per_output_token_seconds_count") == 3
        assert value("inter_token_latency_seconds_count") >= len(events(text)) - 1 > 0
        assert value("request_generation_tokens_sum") == 36
        assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
        drafted = value("spec_decode_num_draft_tokens_total")
        accepted = value("spec_decode_num_accepted_tokens_total")
        assert value("prefix_cache_queries_total") == 7
        assert drafted == 5 * value("spec_decode_num_drafts_total")
        assert 0 < accepted < drafted
        by_position = [value("spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) for k in range(5)]
        assert by_position == sorted(by_position, reverse=True)
        assert sum(by_position) == accepted
        assert value("graph_captures_total", when="startup") > 0
        assert value("graph_captures_total", when="since_startup") == 0
        for family in ("target", "draft", "context"):
            assert value("graph_replays_total", family=family) > 0
        assert value("build_info", version=server.get("/version").json()["version"], model_name="tiny") == 1
        # A client cannot make new time series.
        for path in ("/x", "/y", "/v1/models/a", "/v1/models/b"):
            server.get(path)
        text = server.get("/metrics").text
        assert not re.search(r'handler="[^"]*/(x|y|a|b)"', text)


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("log_prompts", [False, True])
def test_logs_are_structured_and_discreet(pair, capfd, plain_logging, log_format, log_prompts):
    settings = {"log_format": log_format, "log_prompts": log_prompts, "log_level": "info"}
    configure_logging(ServerSettings(**settings))
    with running(pair[0], **settings) as server:
        chat = {"messages": [{"role": "user", "content": "my secret"}], "temperature": 0, "max_tokens": 4}
        answer = server.post("/v1/chat/completions", chat, headers={"X-Request-Id": "mine"}).json()
        server.post("/v1/completions", BODY | {"prompt": "my secret", "stream": True})
        server.post("/v1/completions", BODY | {"prompt": 5, "user": "my secret"})
        server.get("/v1/%0aINFO%20forged")
        server.client.post(server.url + "/v1/completions", data={"prompt": "my secret"})
    lines = [line for line in capfd.readouterr().err.splitlines() if "request_id" in line]
    assert len(lines) == 5
    assert any("my secret" in line for line in lines) == log_prompts
    if log_format == "text":
        assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z info +request request_id=", line) for line in lines)
        return
    facts = [json.loads(line) for line in lines]
    assert facts[0]["request_id"] == "mine"
    assert (facts[0]["status"], facts[0]["completion_tokens"]) == (200, 4)
    assert [entry["status"] for entry in facts] == [200, 200, 400, 404, 415]
    errors = [entry.get("error") for entry in facts]
    assert errors == [None, None, "invalid_value", "not_found", "unsupported_media_type"]
    assert {"time", "level", "event", "duration_ms", "client", "path", "ttft_ms"} <= set(facts[0])
    if log_prompts:
        assert facts[0]["answer_0"] == answer["choices"][0]["message"]["content"]


def test_addresses_that_cannot_be_listened_on():
    with bind(ServerSettings(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind(ServerSettings(port=port))
    bind(ServerSettings(port=port)).close()
    for host in ("no.such.host.invalid", "203.0.113.7", "x" * 300):
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(ServerSettings(host=host, port=0))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"port": 70000}, "port"),
        ({"api_key": ""}, "api-key"),
        ({"api_key": "two words"}, "api-key"),
        ({"max_queued_seqs": -1}, "max-queued-seqs"),
        ({"max_body_bytes": 0}, "max-body-bytes"),
        ({"read_timeout_s": 0}, "read-timeout"),
        ({"request_timeout_s": float("inf")}, "request-timeout"),
        ({"log_format": "xml"}, "log-format"),
        ({"log_level": "loud"}, "log-level"),
        ({"host": ""}, "host"),
        ({"served_model_name": ""}, "served-model-name"),
        ({"cors_origins": ("",)}, "cors-origin"),
    ],
)
def test_settings_out_of_range(settings, match):
    with pytest.raises(ConfigError, match=match):
        ServerSettings(**settings)
