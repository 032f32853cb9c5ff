"""Bad input: exit status 2 and one clear line on standard error, whatever the mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BAD_COMMAND_LINES = [
    (["generate", "hi", "--no-such-option"], "No such option: --no-such-option"),
    (["no-such-command"], "No such command 'no-such-command'"),
    (["generate", "hi", "there"], "unexpected extra argument"),
    (["generate", "hi", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "hi", "--max-tokens"], "--max-tokens"),
    (["generate", "hi", "--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0"),
    (["generate", "hi", "--max-tokens", "-5"], "max_tokens must be an integer of at least 1, got -5"),
    (["generate", "hi", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens"),
    (["generate", "hi", "--temperature", "-0.1"], "temperature must be"),
    (["generate", "hi", "--temperature", "nan"], "temperature must be"),
    (["generate", "hi", "--temperature", "inf"], "temperature must be"),
    (["generate", "hi", "--top-p", "0"], "top_p must be in (0, 1], got 0"),
    (["generate", "hi", "--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
    (["generate", "hi", "--top-p", "nan"], "top_p must be in (0, 1], got nan"),
    (["generate", "hi", "--top-k", "-2"], "top_k"),
    (["generate", "hi", "--min-p", "2"], "min_p"),
    (["generate", "hi", "--presence-penalty", "3"], "presence_penalty"),
    (["generate", "hi", "--frequency-penalty", "-3"], "frequency_penalty"),
    (["generate", "hi", "--repetition-penalty", "0"], "repetition_penalty"),
    (["generate", "hi", "--stop", ""], "stop must not contain an empty string"),
    (["generate", "hi", "--stop-token-ids", "-1"], "stop_token_ids"),
    (["generate", "hi", "--logit-bias", "5"], "logit-bias must be ID=VALUE"),
    (["generate", "hi", "--logit-bias", "five=1"], "logit-bias must be ID=VALUE"),
    (["generate", "hi", "--logit-bias", "-5=1"], "logit_bias keys"),
    (["generate", "hi", "--logit-bias", "5=nan"], "logit_bias values"),
    (["generate", "hi", "-n", "0"], "n must be an integer of at least 1"),
    (["generate", "hi", "-n", "1000000000"], "n must be at most 16384"),
    (["generate", "hi", "--threads", "100000"], "threads must be at most 1024"),
    (["generate", "hi", "--repetition-penalty", "1e-300"], "repetition_penalty must be"),
    (["generate", "hi", "--stop", "caf\udce9"], "stop has a string that is not valid Unicode"),
    (["generate", "hi", "--speculative-config", "[" * 50_000], "not valid JSON"),
    (["generate", "hi", "--logprobs", "21", "--json"], "logprobs"),
    (["generate", "hi", "--logprobs", "2"], "add --json"),
    (["generate", "hi", "--raw", "--system", "be kind"], "--system"),
    (["generate", "hi", "--dtype", "int3"], "dtype must be one of"),
    (["generate", "hi", "--max-model-len", "0"], "max_model_len"),
    (["generate", "hi", "--max-num-seqs", "0"], "max_num_seqs"),
    (["serve", "--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
    (["serve", "--max-decode-stretch", "1"], "max_decode_stretch must be a finite number above 1"),
    (["serve", "--max-decode-stretch", "nan"], "max_decode_stretch"),
    (["generate", "hi", "--threads", "0"], "threads"),
    (["generate", "hi", "--kv-cache-memory", "much"], "kv-cache-memory must be a size"),
    (["generate", "hi", "--kv-cache-memory", "0"], "kv-cache-memory must be a size"),
    (["generate", "hi", "--kv-cache-memory", "-1G"], "kv-cache-memory must be a size"),
    (["generate", "hi", "--model", ""], "model must not be empty"),
    (["generate", "hi", "--model", "smollm2-135"], "did you mean smollm2-135m"),
    (["generate", "hi", "--model", "./no/such/model.gguf"], "no such model directory or file"),
    (["generate", "hi", "--model", "hf:nobody"], "hf:owner/name"),
    (["generate"], "no prompt"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "hi", "--prompt-file", "x"], "two prompts"),
    (["generate", "--prompt-file", "no-such-file.txt"], "cannot read prompt file no-such-file.txt"),
    (["generate", "--prompt-file", "."], "cannot read prompt file ."),
    (["generate", "caf\udce9"], "not valid UTF-8"),
    (["chat", "--temperature", "nan"], "temperature must be"),
    (["chat", "--model", "smollm2-135"], "did you mean smollm2-135m"),
    (["pull"], "Missing argument"),
    (["pull", "no-such-model"], "no model named 'no-such-model'"),
    (["pull", "."], "nothing to pull"),
    (["info", "--model", "no-such-model"], "no model named 'no-such-model'"),
    (["info", "--model", ""], "model must not be empty"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_COMMAND_LINES, ids=lambda value: str(value)[:60])
def test_bad_command_line(
    sparkgap: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path / "cache"))
    result = sparkgap(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("sparkgap: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"caf\xe9", "is not valid UTF-8 at byte 3"),
        (b"\xff\xfeh\x00i\x00", "is not valid UTF-8 at byte 0"),
        (b"\xed\xa0\x80", "is not valid UTF-8 at byte 0"),
        (b"", "the prompt is empty"),
        (b"\n", "the prompt is empty"),
        (b"\xef\xbb\xbf", "the prompt is empty"),
    ],
)
def test_bad_prompt_bytes(sparkgap: Callable[..., Any], tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    for result in (
        sparkgap("generate", "--prompt-file", str(file)),
        sparkgap("generate", "-", stdin=data),
        sparkgap("generate", "--prompt-file", "-", stdin=data),
    ):
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert message in result.err


def test_no_command_shows_the_help_and_fails(sparkgap: Callable[..., Any]) -> None:
    result = sparkgap()
    assert result.status == 2
    assert "generate" in result.out
