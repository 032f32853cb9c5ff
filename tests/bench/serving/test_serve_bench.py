"""`bench serve` against a server whose answers are known."""

import json

import pytest

from sparkgap.cli import main

from .fake_server import FakeServer, serving


@pytest.fixture
def fake():
    with serving(FakeServer()) as server:
        yield server


def run(capsys, fake, *arguments, status=0):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "serve", "--base-url", fake.url, *arguments])
    captured = capsys.readouterr()
    assert exit_info.value.code == status, captured.err
    return captured.out if status == 0 else captured.err


def report(capsys, fake, *arguments):
    return json.loads(run(capsys, fake, "--json", *arguments))


def test_a_closed_loop(capsys, fake):
    fake.delay_s = 0.01
    result = report(capsys, fake, "--num-prompts", "7", "-c", "3", "--max-tokens", "50", "--api-key", "secret")
    assert (result["requests"], result["completed"], result["errors"]) == (7, 7, {})
    assert (result["model"], result["endpoint"], result["max_concurrency"]) == ("fake-model", "chat", 3)
    assert (result["prompt_tokens"], result["completion_tokens"]) == (7 * 7, 7 * 6)
    assert result["tokens_are_counted_by_server"]
    assert result["peak_concurrency"] == fake.most_open == 3
    assert len(fake.bodies) == 8
    assert set(fake.keys) == {"Bearer secret"}
    path, body = fake.bodies[-1]
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("fake-model", 50, 0, True)
    assert len(body["messages"]) == 1
    assert result["ttft_ms"]["count"] == result["e2el_ms"]["count"] == 7
    assert result["itl_ms"]["count"] == 7 * 2
    # Pieces come 10 ms apart, three an answer, and stand for two tokens each.
    assert result["ttft_ms"]["p50"] >= 10
    assert result["e2el_ms"]["p50"] >= 30
    assert result["tpot_ms"]["p50"] >= 2 * 10 / 5
    assert result["output_tokens_per_s"] == pytest.approx(42 / result["duration_s"])
    assert result["total_tokens_per_s"] == pytest.approx((42 + 49) / result["duration_s"])


def test_an_open_loop(capsys, fake):
    fake.delay_s = 0.05
    result = report(capsys, fake, "--num-prompts", "12", "--request-rate", "100", "--num-warmups", "0")
    assert result["completed"] == 12
    assert result["max_concurrency"] is None
    # Answers take 0.15 s, and requests come every 0.01 s.
    assert result["peak_concurrency"] > 3
    limited = report(capsys, fake, "--num-prompts", "12", "--request-rate", "100", "-c", "2", "--num-warmups", "0")
    assert limited["peak_concurrency"] == 2
    # Requests that wait for a place wait on their own clocks.
    assert limited["ttft_ms"]["max"] > 3 * 150


def test_acceptance_comes_from_metrics(capsys, fake):
    speculation = report(capsys, fake, "--num-prompts", "5", "--num-warmups", "2")["speculation"]
    assert speculation == {
        "draft_rounds": 5,
        "draft_tokens": 20,
        "accepted_draft_tokens": 15,
        "acceptance_rate": 0.75,
        "accepted_per_round": 3.0,
        "acceptance_by_position": [2.0, 1.0],
    }
    fake.metrics = False
    assert report(capsys, fake, "--num-prompts", "2")["speculation"] is None


FAILURES = {
    429: ("status 429", "too many"),
    500: ("status 500", "too many"),
    "cut": ("connection lost", "the stream ended in the middle of the answer"),
    "error": ("error in the stream", "out of memory"),
    "malformed": ("malformed answer", "JSONDecodeError"),
    "hang": ("timeout", "ReadTimeout"),
}


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_failures_are_counted_by_kind(capsys, fake, failure):
    kind, detail = FAILURES[failure]
    fake.behave = lambda number: failure if number in (1, 3) else None
    arguments = ["--num-prompts", "6", "--num-warmups", "0", "--goodput", "ttft:60000"]
    if failure == "hang":
        arguments += ["--timeout", "1"]
    result = report(capsys, fake, *arguments)
    assert result["errors"] == {kind: 2}
    assert detail in result["error_details"][kind]
    assert "\n" not in result["error_details"][kind]
    assert result["completed"] == result["e2el_ms"]["count"] == 4
    assert result["goodput"]["requests"] == 4
    assert result["goodput"]["share"] == pytest.approx(4 / 6)


def test_nothing_completed(capsys, fake):
    fake.behave = lambda number: 503
    message = run(capsys, fake, "--num-prompts", "3", "--num-warmups", "0", status=2)
    assert message == "sparkgap: error: all 3 requests failed, the first with status 503: too many\n"
    assert "warm-up request with status 503: too many" in run(capsys, fake, "--num-prompts", "3", status=2)


def test_goodput(capsys, fake):
    fake.delay_s = 0.02
    slow = report(capsys, fake, "--num-prompts", "4", "--goodput", "ttft:60000", "--goodput", "e2el:1")["goodput"]
    assert (slow["requests"], slow["requests_per_s"]) == (0, 0)
    assert slow["objectives_ms"] == {"ttft": 60000, "e2el": 1}
    good = report(capsys, fake, "--num-prompts", "4", "--goodput", "tpot:60000")
    assert good["goodput"]["requests_per_s"] == pytest.approx(good["requests_per_s"])


def test_made_up_prompts(capsys, fake):
    report(capsys, fake, "--num-prompts", "3", "--input-len", "40", "--output-len", "9", "--num-warmups", "0")
    prompts = [body["messages"][0]["content"] for _, body in fake.bodies]
    assert [len(prompt.split()) for prompt in prompts] == [40] * 3
    assert len({prompt.split()[0] + prompt.split()[1] for prompt in prompts}) == 3
    assert {body["max_tokens"] for _, body in fake.bodies} == {9}
    report(capsys, fake, "--num-prompts", "3", "--input-len", "40", "--num-warmups", "0")
    assert [body["messages"][0]["content"] for _, body in fake.bodies[3:]] == prompts


def test_prompts_of_a_file_in_turn(capsys, fake, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\nsecond\n")
    arguments = ["--prompts", str(file), "--raw", "--ignore-eos", "--extra-body", '{"top_k": 5, "temperature": 0.5}']
    result = report(capsys, fake, "--num-prompts", "5", "--num-warmups", "0", "--model", "mine", *arguments)
    assert result["endpoint"] == "completions"
    assert {path for path, _ in fake.bodies} == {"/v1/completions"}
    bodies = [body for _, body in fake.bodies]
    assert [body["prompt"] for body in bodies] == ["first", "second", "first", "second", "first"]
    for body in bodies:
        assert (body["ignore_eos"], body["top_k"], body["temperature"], body["model"]) == (True, 5, 0.5, "mine")


def test_a_server_that_counts_no_tokens(capsys, fake):
    fake.usage = False
    result = report(capsys, fake, "--num-prompts", "2")
    assert not result["tokens_are_counted_by_server"]
    assert result["completion_tokens"] == 6
    assert "pieces of text are counted instead" in run(capsys, fake, "--num-prompts", "2")


def test_the_table(capsys, fake):
    fake.behave = lambda number: 429 if number == 2 else None
    text = run(capsys, fake, "--num-prompts", "4", "-c", "2", "--goodput", "ttft:500")
    for part in ("fake-model at http://127.0.0.1", "3 of 4 requests", "closed loop, at most 2 open", "p99"):
        assert part in text
    for part in ("time to first token", "75.0% of 16 draft tokens accepted, 3.00 a round", "ttft within 500 ms"):
        assert part in text
    assert "1 failed, status 429: too many" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--num-prompts", "0"], "num-prompts must be at least 1"),
        (["-c", "0"], "max-concurrency must be at least 1"),
        (["--request-rate", "0"], "request-rate must be a number above 0"),
        (["--request-rate", "nan"], "request-rate must be a number above 0"),
        (["--num-warmups", "-1"], "num-warmups must be at least 0"),
        (["--goodput", "ttft"], "METRIC:MILLISECONDS"),
        (["--goodput", "itl:3"], "ttft, tpot, e2el"),
        (["--endpoint", "embed"], "chat, completions"),
        (["--endpoint", "chat", "--raw"], "--raw"),
        (["--extra-body", "[1]"], "extra-body must be a JSON object"),
        (["--extra-body", "{"], "not valid JSON"),
        (["--base-url", "127.0.0.1:8000"], "base-url must be a URL"),
        (["--base-url", "http://[::1"], "base-url must be a URL"),
        (["--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--timeout", "0"], "timeout must be"),
        (["--input-len", "5", "--prompts", "x"], "use one of them"),
        (["--prompts", "/no/such/file"], "cannot read prompts file"),
        (["--max-tokens", "0"], "max-tokens must be at least 1"),
    ],
)
def test_bad_options_are_one_line(capsys, fake, arguments, part):
    message = run(capsys, fake, *arguments, status=2)
    assert part in message
    assert message.count("\n") == 1


def test_a_url_with_v1(capsys, fake):
    fake.url += "/v1/"
    assert report(capsys, fake, "--num-prompts", "1")["completed"] == 1
