"""What is taken and what is refused, field by field."""

import threading

import pytest
from pydantic import ValidationError

from sparkgap.server.errors import from_validation
from sparkgap.server.requests import ChatBody, CompletionBody

from .running import check_error

_USED = {
    "model",
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stream",
    "stream_options",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "speculation",
    "deadline_s",
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
    "prompt",
    "echo",
    "best_of",
    "add_special_tokens",
}
_IGNORED = {
    "user",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "prediction",
    "parallel_tool_calls",
}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def refused(model, body):
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    error = from_validation(found.value.errors())
    assert error.status == 400
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("reasoning_effort", "high"),
        ("service_tier", "priority"),
        ("store", True),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, name, value):
    error = refused(ChatBody, CHAT | {name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert name in error.message
    message = check_error(server.post("/v1/chat/completions", CHAT | {name: value}), 400, param=name)
    assert message == error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("service_tier", "auto"),
        ("store", False),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "s"),
        ("parallel_tool_calls", True),
        ("prediction", {"type": "content", "content": "x"}),
        ("stream_options", {"include_usage": True, "include_obfuscation": False}),
        ("stop", []),
    ],
)
def test_what_asks_for_nothing_is_taken(name, value):
    ChatBody.model_validate(CHAT | {name: value})


@pytest.mark.parametrize("name", [*ChatBody.model_fields, *CompletionBody.model_fields])
def test_null_is_as_good_as_nothing(name):
    model, body = (ChatBody, CHAT) if name in ChatBody.model_fields else (CompletionBody, {"prompt": "x"})
    if name not in body and name != "prompt":
        assert model.model_validate(body | {name: None}) == model.model_validate(body)


def test_unknown_fields_are_refused_as_openai_does():
    error = refused(ChatBody, CHAT | {"temprature": 1})
    assert error.message == "Unrecognized request argument supplied: temprature"
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    error = refused(ChatBody, CHAT | {"stream_options": {"x": 1}})
    assert error.param == "stream_options.x"
    assert refused(CompletionBody, {"prompt": "x", "messages": []}).param == "messages"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": 1}, "stream"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_values_out_of_range(change, param):
    assert refused(ChatBody, CHAT | change).param == param


def test_other_parts_than_text_are_refused_by_name():
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}):
        error = refused(ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]})
        assert (error.param, error.code) == ("messages[0].content[1].type", "unsupported_parameter")
        assert part["type"] in error.message


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1, "a"], ["a", 1], [[1], "a"], [-1], [True], {"a": 1}, [1.5]])
def test_prompts_of_no_form(prompt):
    assert refused(CompletionBody, {"prompt": prompt}).param.startswith("prompt")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "prompt[0]: List should have at least 1 item"),
        ({"prompt": ["a", 1]}, "prompt[1]: Input should be a valid string"),
        ({"prompt": [1, "a"]}, "prompt[1]: Input should be a valid integer"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]: Input should be greater than or equal to 0"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": "x" * 257}, "stop: String should have at most 256 characters"),
        ({"stop": 5}, "stop: Input should be a valid string"),
    ],
)
def test_what_is_wrong_with_a_value_of_several_types(change, told):
    assert refused(CompletionBody, {"prompt": "x"} | change).message.startswith(told)


@pytest.mark.parametrize("name", ["messages", "self", "tokenizer", "add_generation_prompt", "text", "template"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_template_variables_may_have_any_name_but_one(server, path, name):
    body = {"messages": CHAT["messages"], "chat_template_kwargs": {name: 1}}
    answer = server.post(path, body)
    if name == "messages":
        assert "messages" in check_error(answer, 400, param="messages")
    else:
        assert answer.status_code == 200


def test_the_generation_prompt_can_be_a_template_variable(server):
    def prompt(**fields):
        return server.post("/tokenize", {"messages": CHAT["messages"]} | fields).json()["tokens"]

    without = prompt(add_generation_prompt=False)
    assert without != prompt()
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == without
    assert prompt(add_generation_prompt=True, chat_template_kwargs={"add_generation_prompt": False}) == prompt()


def test_requests_need_no_other_threads(server):
    assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
    assert not [thread.name for thread in threading.enumerate() if "AnyIO" in thread.name]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ("/v1/chat/completions", {"logit_bias": {"9999": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"stop_token_ids": [9999]}, "stop_token_ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": ""}, None),
        ("/v1/completions", {"prompt": [9999]}, None),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": CHAT["messages"], "prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
    ],
)
def test_what_does_not_fit_the_model(server, path, body, param):
    base = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x"}}.get(path, {})
    check_error(server.post(path, base | body), 400, param=param)


def test_a_value_that_is_not_supported_is_refused_with_a_code(server):
    message = check_error(
        server.post("/v1/completions", {"prompt": "x", "best_of": 3}),
        400,
        param="best_of",
        code="unsupported_parameter",
    )
    assert message == "best_of 3 with n 1 is not supported; leave it out, or use 1"


def test_no_field_has_two_meanings():
    """Every field of a request is used, refused, or one that OpenAI's servers need and answers do not depend on."""
    for model in (ChatBody, CompletionBody):
        for name, field in model.model_fields.items():
            refuses = isinstance(field.json_schema_extra, dict) and "enum" in field.json_schema_extra
            assert [name in _USED, name in _IGNORED, refuses].count(True) == 1, name
