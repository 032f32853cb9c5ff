"""What clients do wrong on the wire, slowly, or in masses: nobody else notices."""

import json
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .running import check_error, events, running, wait_until

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BODY = {"prompt": "ab", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def strict(pair):
    """A server with little patience."""
    with running(
        pair[0], read_timeout_s=1, write_timeout_s=1, max_body_bytes=5000, max_connections=12, log_level="error"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def reference(strict):
    return strict.post("/v1/completions", BODY).json()["choices"]


def head(length, *lines, path="/v1/completions"):
    fixed = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def read_all(connection):
    connection.settimeout(20)
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def test_bodies_that_are_too_large(strict, reference):
    check_error(strict.post("/v1/completions", BODY | {"prompt": "x" * 6000}), 413, code="body_too_large")

    def pieces():
        for _ in range(100):
            yield b"x" * 100

    answer = strict.client.post(
        strict.url + "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    check_error(answer, 413)
    with strict.connect() as connection:
        connection.sendall(head(10**18))
        assert b" 413 " in connection.recv(1000)
    assert strict.post("/v1/completions", BODY).json()["choices"] == reference


@pytest.mark.parametrize("begin", [b"", b"GE", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_heads_that_never_end(strict, begin):
    with strict.connect() as connection:
        connection.sendall(begin)
        started = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - started > 0.5


def test_a_head_that_trickles_ends_all_the_same(strict):
    with strict.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        started = time.monotonic()

        def is_open():
            try:
                connection.sendall(b"X-1: y\r\n")
            except OSError:
                return False
            return True

        while is_open():
            time.sleep(0.05)
            assert time.monotonic() - started < 20


def test_a_body_that_never_ends(strict):
    with strict.connect() as connection:
        connection.sendall(head(100) + b'{"prompt":')
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "body_timeout"


def test_a_connection_that_idles_after_a_response(strict):
    with strict.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_too_many_connections(strict, reference):
    wait_until(lambda: len(strict_connections(strict)) == 0)
    held = [strict.connect() for _ in range(12)]
    try:
        wait_until(lambda: len(strict_connections(strict)) == 12)
        check_error(strict.get("/health"), 503, type="server_error", code="too_many_connections")
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: strict.get("/health").status_code == 200)
    assert strict.post("/v1/completions", BODY).json()["choices"] == reference


def strict_connections(server):
    return server.process.server.server_state.connections


def test_a_reader_that_reads_nothing_is_dropped(pair):
    """Its request ends, and its connection is not kept for what it does not take."""
    with running(pair[0], write_timeout_s=0.5) as server:
        # Else the system keeps the whole answer for a client that does not read.
        server.process.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.port))
        messages = [{"role": "user", "content": "x"}]
        body = {"messages": messages, "n": 4, "max_tokens": 40, "logprobs": True, "top_logprobs": 20, "stream": True}
        data = json.dumps(body | {"ignore_eos": True}).encode()
        connection.sendall(head(len(data), path="/v1/chat/completions") + data)
        wait_until(lambda: server.llm.stats.num_generated_tokens > 0)
        begun = time.monotonic()
        wait_until(lambda: not strict_connections(server))
        assert time.monotonic() - begun < server.settings.read_timeout_s / 2
        wait_until(server.is_idle)
        connection.close()
        assert server.post("/v1/completions", BODY).status_code == 200


def test_idle_streams_do_not_stop_others(server):
    """Connections that hold a request open and read nothing, while others are served."""
    held = []
    body = json.dumps(BODY | {"stream": True, "max_tokens": 60, "ignore_eos": True}).encode()
    try:
        for _ in range(25):
            held.append(server.connect())
            held[-1].sendall(head(len(body)) + body)
        for _ in range(3):
            assert server.post("/v1/completions", BODY).status_code == 200
    finally:
        for connection in held:
            connection.close()
    wait_until(server.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(server, stream):
    aborted = server.metric("request_success_total", finished_reason="abort") if stream else 0
    body = json.dumps(
        {"prompt": "x", "max_tokens": 120, "n": 60, "ignore_eos": True, "stream": stream, "temperature": 1}
    ).encode()
    with server.connect() as connection:
        connection.sendall(head(len(body)) + body)
        wait_until(lambda: server.llm.stats.num_running_sequences == 4)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    wait_until(server.is_idle)
    wait_until(lambda: server.metric("request_success_total", finished_reason="abort") >= aborted + 60 * stream)


def test_a_client_that_goes_away_in_its_body(server):
    with server.connect() as connection:
        connection.sendall(head(1000) + b"{")
    assert server.post("/v1/completions", BODY).status_code == 200
    wait_until(server.is_idle)


def test_pipelined_requests(strict, reference):
    body = json.dumps(BODY).encode()
    with strict.connect() as connection:
        connection.sendall((head(len(body)) + body) * 3)
        data = b""
        while data.count(b'"choices"') < 3:
            data += connection.recv(65536)
    assert data.count(json.dumps(reference[0]["text"], ensure_ascii=False).encode()) == 3


@pytest.mark.parametrize(
    "junk",
    [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http(strict, reference, junk):
    with strict.connect() as connection:
        connection.sendall(junk)
        answer = read_all(connection)
        assert not answer or answer.split(b" ")[1] in (b"400", b"200", b"404", b"415")
    assert strict.post("/v1/completions", BODY).json()["choices"] == reference


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]), st.binary(max_size=200)
)
def test_bytes_that_are_no_json(strict, path, data):
    answer = strict.client.post(strict.url + path, content=data, headers={"Content-Type": "application/json"})
    check_error(answer, 400)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 4000,
        b'{"prompt":' * 400,
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 4500 + b"}",
        b'{"prompt": "x", "max_tokens": 1e3}',
        b"null",
        b'"x"',
        b"[]",
        b"",
    ],
)
def test_json_that_is_no_request(strict, data):
    for path in POSTS:
        answer = strict.client.post(strict.url + path, content=data, headers={"Content-Type": "application/json"})
        check_error(answer, 400)


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types_are_refused(strict, given):
    """Web pages may send these to any server; JSON they may not."""
    answer = strict.client.post(
        strict.url + "/v1/completions", content=json.dumps(BODY), headers={"Content-Type": given}
    )
    check_error(answer, 415)


def test_paths_and_methods(strict):
    check_error(strict.get("/v1/nothing"), 404, code="not_found")
    check_error(strict.get("/v1/completions"), 405, code="method_not_allowed")
    assert strict.get("/v1/completions").headers["allow"] == "POST"
    check_error(strict.client.delete(strict.url + "/health"), 405)
    check_error(strict.get("/docs"), 404)
    check_error(strict.get("/v1/models/"), 404)
    assert strict.get("/health").headers.get("server") is None


def test_request_ids(strict):
    assert strict.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("two words", "x" * 200, "\u00e9", 'a"b'):
        given_id = strict.get("/health", headers={"X-Request-Id": bad.encode("latin-1")}).headers["x-request-id"]
        assert given_id.startswith("req-")


def test_web_pages_are_let_in_only_when_that_is_wanted(strict, pair):
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = strict.client.options(strict.url + "/v1/completions", headers=asked)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in strict.get("/health", headers=asked).headers
    with running(pair[0], cors_origins=("https://page.example/",), api_key="k") as server:
        answer = server.client.options(server.url + "/v1/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
        other = server.client.options(
            server.url + "/v1/completions", headers=asked | {"Origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers
        answer = server.post("/v1/completions", BODY, headers=asked | {"Authorization": "Bearer k"})
        assert answer.headers["access-control-allow-origin"] == "https://page.example"


def test_a_stream_on_the_wire(strict):
    answer = strict.post("/v1/completions", BODY | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert all(len(event["choices"]) == 1 for event in events(answer.text))
