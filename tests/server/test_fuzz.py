"""Requests made from the server's own OpenAPI document, and raw bytes: no 5xx, no hang, and exact afterwards."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from .running import running, wait_until

REFERENCE = {"prompt": "ab", "temperature": 0, "max_tokens": 20}


def refused_or_too_large(context, response, case):
    """Wrong data is refused, whatever else is wrong with it."""
    return None if response.status_code == 413 else negative_data_rejection(context, response, case)


CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    refused_or_too_large,
)


@pytest.fixture(scope="module")
def fuzzed(pair):
    model, drafter = pair
    with running(model, speculative_config={"model": str(drafter)}, log_level="error", max_body_bytes=20000) as server:
        yield server


@pytest.fixture(scope="module")
def document(fuzzed):
    return schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")


def exact(server):
    answer = server.post("/v1/completions", REFERENCE)
    assert answer.status_code == 200
    return answer.json()["choices"]


def operations(document):
    return [result.ok() for result in document.get_all_operations()]


def fuzz(server, document, mode, examples):
    """Give every operation `examples` requests of a kind."""
    before = exact(server)
    for operation in operations(document):
        if operation.method.upper() == "GET" and mode is schemathesis.GenerationMode.NEGATIVE:
            continue  # there is nothing in it that could be wrong

        @settings(
            max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            if isinstance(case.body, dict):
                # What is asked for is not to be long.
                if isinstance(case.body.get("n"), int):
                    case.body["n"] = min(case.body["n"], 3)
                if isinstance(case.body.get("prompt"), list):
                    case.body["prompt"] = case.body["prompt"][:3]
            response = case.call(base_url=server.url, session=None, timeout=60)
            streams = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
            case.validate_response(response, checks=[not_a_server_error] if streams else list(CHECKS))

        run()
    assert exact(server) == before
    wait_until(server.is_idle)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_requests_from_the_document(fuzzed, document, mode):
    fuzz(fuzzed, document, mode, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_many_requests_from_the_document(fuzzed, document, mode):
    fuzz(fuzzed, document, mode, 100)


def fuzz_raw(server, examples):
    """Give the server `examples` requests that are hardly HTTP."""
    methods = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"\xff"])
    paths = st.sampled_from([b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/health", b"/%ff", b"*"])
    headers = st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=30)), max_size=3)
    before = exact(server)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(methods, paths, headers, st.binary(max_size=300), st.booleans())
    def run(method, path, lines, body, has_length):
        send_raw(server, method, path, lines, body, has_length)

    run()
    assert exact(server) == before
    wait_until(server.is_idle)


def send_raw(server, method, path, headers, body, has_length):
    lines = [b"%s %s HTTP/1.1" % (method, path), b"Host: x", b"Content-Type: application/json"]
    lines += [name + b": " + value for name, value in headers]
    if has_length:
        lines.append(b"Content-Length: %d" % len(body))
    with server.connect() as connection:
        connection.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
        connection.settimeout(30)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            return
    assert not answer or answer.split(b" ", 2)[1][:1] in (b"2", b"4"), answer


def test_raw_bytes(fuzzed):
    fuzz_raw(fuzzed, 60)


@pytest.mark.slow
def test_many_raw_bytes(fuzzed):
    fuzz_raw(fuzzed, 1500)


def test_every_endpoint_is_in_the_document(fuzzed):
    paths = set(httpx.get(fuzzed.url + "/openapi.json").json()["paths"])
    assert paths == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
    }
