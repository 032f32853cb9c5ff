"""`sparkgap generate`: where the prompt comes from, what the model is asked, what is printed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkgap.errors import EngineError, PromptError

USER_HI = [{"role": "user", "content": "hi"}]


def test_the_answer_is_on_stdout_and_the_footer_on_stderr(sparkgap: Callable[..., Any], llm: Any) -> None:
    result = sparkgap("generate", "hi")
    assert (result.status, result.out) == (0, "one two three\n")
    assert "3 tokens" in result.err
    assert "80.5 tokens/s" in result.err
    assert "first token after 12 ms" in result.err
    assert llm.requests == [USER_HI]
    assert llm.streams_closed == 1


def test_the_footer_says_what_became_of_drafts(sparkgap: Callable[..., Any], llm: Any) -> None:
    assert "draft" not in sparkgap("generate", "hi").err
    llm.drafts = {"draft_rounds": 4, "draft_tokens": 10, "accepted_draft_tokens": 7, "accepted_per_round": 1.75}
    for extra in ([], ["--no-stream"]):
        assert ", 1.75 of 2.5 draft tokens accepted a round" in sparkgap("generate", "hi", *extra).err
    llm.drafts = {"draft_rounds": 4, "draft_tokens": 28, "accepted_draft_tokens": 0, "accepted_per_round": 0.0}
    assert ", 0.00 of 7 draft tokens accepted a round" in sparkgap("generate", "hi").err
    llm.drafts = {"not_speculated": {"too long": 2, "the last tokens stood nowhere before": 9}}
    nothing = ", 0 of 0 draft tokens accepted: the last tokens stood nowhere before"
    for extra in ([], ["--no-stream"]):
        assert nothing in sparkgap("generate", "hi", *extra).err


def test_json_has_no_more_digits_than_it_means(sparkgap: Callable[..., Any], llm: Any) -> None:
    llm.drafts = {
        "draft_rounds": 3,
        "acceptance_rate": 1 / 3,
        "acceptance_by_position": [2 / 3, 0.0],
        "accepted_per_round": 7 / 3,
        "queue_ms": 0.123456789,
    }
    metrics = json.loads(sparkgap("generate", "hi", "--json").out)["metrics"]
    assert (metrics["acceptance_rate"], metrics["acceptance_by_position"]) == (0.3333, [0.6667, 0.0])
    assert (metrics["accepted_per_round"], metrics["queue_ms"]) == (2.3333, 0.1235)
    assert (metrics["draft_rounds"], metrics["prompt_tokens"]) == (3, 2)


@pytest.mark.parametrize("extra", [[], ["--no-stream"], ["--json"]])
def test_a_prompt_is_a_user_message_and_raw_is_text(sparkgap: Callable[..., Any], llm: Any, extra: list[str]) -> None:
    assert sparkgap("generate", "hi", *extra).status == 0
    assert sparkgap("generate", "hi", "--raw", *extra).status == 0
    assert sparkgap("generate", "hi", "--system", "be kind", *extra).status == 0
    assert llm.requests == [USER_HI, "hi", [{"role": "system", "content": "be kind"}, *USER_HI]]


def test_without_a_chat_template_the_prompt_is_text(sparkgap: Callable[..., Any], llm: Any) -> None:
    llm.tokenizer.chat_template = None
    assert sparkgap("generate", "hi").status == 0
    assert llm.requests == ["hi"]
    result = sparkgap("generate", "hi", "--system", "be kind")
    assert result.status == 2
    assert "has no chat template" in result.err


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"hi\n", "hi"),
        (b"hi\r\n", "hi"),
        (b"hi\n\n", "hi\n"),
        (b" hi ", " hi "),
        (b"\xef\xbb\xbfhi", "hi"),
        ("héllo 漢字 🙂".encode(), "héllo 漢字 🙂"),
        (b"a\x00b", "a\x00b"),
    ],
)
def test_prompt_files_and_standard_input(
    sparkgap: Callable[..., Any], llm: Any, tmp_path: Path, data: bytes, prompt: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    for result in (
        sparkgap("generate", "--raw", "--prompt-file", str(file)),
        sparkgap("generate", "--raw", "-", stdin=data),
        sparkgap("generate", "--raw", "--prompt-file", "-", stdin=data),
    ):
        assert result.status == 0
    assert llm.requests == [prompt] * 3


def test_options_reach_the_engine_and_the_request(sparkgap: Callable[..., Any], llm: Any) -> None:
    engine = "--model m --dtype float32 --device cpu --max-model-len 99 --max-num-seqs 3 --seed 5 --threads 2 --offline"
    engine += " --graphs off"
    sampling = (
        "--max-tokens 7 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --presence-penalty 1 "
        "--frequency-penalty -1 --repetition-penalty 1.1 --logit-bias 5=-2.5 --logit-bias 6=3 --stop a --stop b "
        "--stop-token-ids 8 --stop-token-ids 9 --ignore-eos"
    )
    kv = ["--kv-cache-memory", "1.5GiB"]
    assert sparkgap("generate", "hi", *engine.split(), *kv, *sampling.split()).status == 0
    config, params = llm.config, llm.params[0]
    assert (config.model, config.dtype, config.device, config.max_model_len) == ("m", "float32", "cpu", 99)
    assert (config.max_num_seqs, config.seed, config.threads, config.graphs) == (3, 5, 2, "off")
    assert (config.allow_download, config.kv_cache_memory_bytes) == (False, 3 * 2**29)
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (7, 2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.presence_penalty) == (40, 0.1, 1.0)
    assert (params.frequency_penalty, params.repetition_penalty) == (-1.0, 1.1)
    assert params.logit_bias == {5: -2.5, 6: 3.0}
    assert params.stop_strings == ("a", "b")
    assert list(params.stop_token_ids) == [8, 9]
    assert params.ignore_eos


def test_greedy_is_the_default(sparkgap: Callable[..., Any], llm: Any) -> None:
    sparkgap("generate", "hi")
    assert llm.params[0].greedy


def test_json_is_one_object_and_nothing_else(sparkgap: Callable[..., Any], llm: Any) -> None:
    llm.words = ("a\n", '"é', "\x1b")
    result = sparkgap("generate", "hi", "--json")
    assert (result.err, result.out.count("\n")) == ("", 1)
    report = json.loads(result.out)
    assert report["text"] == 'a\n"é\x1b'
    assert report["token_ids"] == [0, 1, 2]
    assert report["finish_reason"] == "stop"
    assert report["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert report["metrics"]["ttft_ms"] == 12.0
    assert report["graphs"] == llm.graph_counts()
    assert "choices" not in report


def test_several_answers(sparkgap: Callable[..., Any], llm: Any) -> None:
    assert sparkgap("generate", "hi", "-n", "2").out == "one two three\none two three\n"
    report = json.loads(sparkgap("generate", "hi", "-n", "2", "--json").out)
    assert [choice["index"] for choice in report["choices"]] == [0, 1]
    assert report["usage"]["completion_tokens"] == 6


def test_an_answer_that_was_cut_says_so(sparkgap: Callable[..., Any], llm: Any) -> None:
    llm.finish_reason = "length"
    assert "--max-tokens" in sparkgap("generate", "hi").err


@pytest.mark.parametrize("extra", [[], ["--raw"]])
def test_ctrl_c_ends_quietly(sparkgap: Callable[..., Any], llm: Any, extra: list[str]) -> None:
    def interrupt(index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt

    llm.before_word = interrupt
    result = sparkgap("generate", "hi", *extra)
    assert (result.status, result.out, result.err) == (130, "one\n", "")
    assert llm.streams_closed == 1


def test_an_error_of_the_model_is_one_line(sparkgap: Callable[..., Any], llm: Any) -> None:
    def fail(index: int) -> None:
        raise PromptError("the prompt has 99 tokens,\nand the context holds 64")

    llm.before_word = fail
    result = sparkgap("generate", "hi")
    assert result.status == 2
    assert result.err == "sparkgap: error: the prompt has 99 tokens, and the context holds 64\n"
    assert result.out == ""


def test_a_request_that_fails_in_its_course_is_one_line(sparkgap: Callable[..., Any], llm: Any) -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise EngineError("the model gave no finite logits; try --dtype float32")

    llm.before_word = fail
    result = sparkgap("generate", "hi")
    assert (result.status, result.out) == (2, "one\n")
    assert result.err == "sparkgap: error: the model gave no finite logits; try --dtype float32\n"


def test_logprobs_in_json(sparkgap: Callable[..., Any], llm: Any) -> None:
    report = json.loads(sparkgap("generate", "hi", "--json", "--logprobs", "1").out)
    best = {"token_id": 99, "token": "best", "logprob": -0.5, "rank": 1}
    chosen = {"token_id": 2, "token": "chosen", "logprob": -1.5, "rank": 2}
    assert len(report["logprobs"]) == 3
    assert report["logprobs"][2] == {**chosen, "top": [best, chosen]}
