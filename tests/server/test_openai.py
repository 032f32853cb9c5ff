"""The current `openai` package against a running server, with the model in this process as the judge."""

import asyncio

import openai
import pytest

from sparkgap import SamplingParams

from .running import running, wait_until

MESSAGES = [{"role": "user", "content": "Say something"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def chat(client, **options):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def judge(llm, **params):
    (output,) = llm.chat(MESSAGES, SamplingParams(**params))
    return output.outputs


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "sparkgap"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 20},
        {"temperature": 0, "max_completion_tokens": 20, "max_tokens": 5},
        {"seed": 3, "max_tokens": 20, "temperature": 0.8, "top_p": 0.9},
        {"seed": 3, "max_tokens": 20, "n": 3},
        {"temperature": 0, "max_tokens": 20, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "max_tokens": 20, "logit_bias": {"65": 100}},
        {"seed": 9},
    ],
)
def test_chat_is_the_model_in_process(client, llm, options):
    answer = chat(client, **options)
    limit = options.get("max_completion_tokens", options.get("max_tokens"))
    names = {name: value for name, value in options.items() if name not in ("max_completion_tokens", "max_tokens")}
    if "logit_bias" in names:
        names["logit_bias"] = {int(token): bias for token, bias in names["logit_bias"].items()}
    expected = judge(llm, max_tokens=limit, **names)
    assert [choice.message.content for choice in answer.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in answer.choices] == [output.finish_reason for output in expected]
    assert [choice.index for choice in answer.choices] == list(range(options.get("n", 1)))
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 5, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"ignore_eos": True},
        {"stop_token_ids": list(range(60, 110)), "min_tokens": 4},
        {"stop_token_ids": list(range(60, 110)), "include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"speculation": False},
    ],
)
def test_fields_of_vllm_and_ours(client, llm, extra):
    answer = chat(client, seed=4, max_tokens=24, extra_body=extra)
    (expected,) = judge(llm, seed=4, max_tokens=24, **extra)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.choices[0].stop_reason == expected.stop_reason


def test_speculation_can_be_switched_off(client, server):
    wait_until(server.is_idle)  # Surplus rounds of earlier requests are counted too.
    drafts = server.metric("spec_decode_num_drafts_total")
    chat(client, temperature=0, max_tokens=24, extra_body={"speculation": False, "ignore_eos": True})
    assert server.metric("spec_decode_num_drafts_total") == drafts
    chat(client, temperature=0, max_tokens=24, extra_body={"ignore_eos": True})
    assert server.metric("spec_decode_num_drafts_total") > drafts
    assert server.metric("spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize("number", [None, 0, 3])
def test_chat_logprobs(client, llm, number):
    answer = chat(client, temperature=0, max_tokens=12, logprobs=True, top_logprobs=number)
    (expected,) = judge(llm, temperature=0, max_tokens=12, logprobs=number or 0)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [
        table[token].logprob for token, table in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    assert [len(entry.top_logprobs) for entry in content] == [number or 0] * len(content)
    # One token is one byte, and the special ones' text is their own.
    for entry, token in zip(content, expected.token_ids, strict=True):
        if token < 256:
            assert len(entry.bytes) == 1
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert not values or values[0] == entry.logprob


@pytest.mark.parametrize("extra", [{}, {"n": 3, "seed": 5, "temperature": 1}, {"stop": ["q", "zz"], "seed": 8}])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_adds_up(client, extra, logprobs):
    options = {"temperature": 0.7, "max_tokens": 30, "logprobs": logprobs, "seed": 1} | extra
    if logprobs:
        options["top_logprobs"] = 2
    whole = chat(client, **options)
    chunks = list(chat(client, **options, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        if logprobs:
            content = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
            assert content == choice.logprobs.content
    without = list(chat(client, **options, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in without)


def test_stop_strings(client, llm):
    text = chat(client, seed=8, max_tokens=30, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = text[10:12]
    answer = chat(client, seed=8, max_tokens=30, stop=[stop, "\0\0"], extra_body={"ignore_eos": True}).choices[0]
    assert answer.message.content == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_text_parts_are_joined(client):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "more"}]

    def answer(content):
        messages = [{"role": "system", "content": "short"}, {"role": "user", "content": content}]
        return client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=9)

    assert answer(parts).choices[0].message == answer("Say\nmore").choices[0].message


def test_an_answer_can_be_sent_back(client):
    """Clients send the message object that they were given, with all its empty fields."""
    message = chat(client, temperature=0, max_tokens=5).choices[0].message.model_dump()
    assert set(message) > {"tool_calls", "function_call", "audio", "annotations"}
    history = [*MESSAGES, message, *MESSAGES]
    client.chat.completions.create(model="tiny", messages=history, temperature=0, max_tokens=5)


def test_completions(client, llm):
    params = SamplingParams(seed=2, max_tokens=16, n=2)
    prompts = ["ab", "cde", "f"]
    expected = [output for whole in llm.generate(prompts, params) for output in whole.outputs]
    answer = client.completions.create(model="tiny", prompt=prompts, seed=2, n=2)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 6
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    same = client.completions.create(model="tiny", prompt=ids, seed=2, n=2)
    assert same.choices == answer.choices
    one = client.completions.create(model="tiny", prompt=ids[0], seed=2, n=2)
    assert one.choices == answer.choices[:2]
    echoed = client.completions.create(model="tiny", prompt=prompts, seed=2, n=2, echo=True)
    assert [c.text for c in echoed.choices] == [prompts[i // 2] + c.text for i, c in enumerate(answer.choices)]
    for echo in (False, True):
        texts = [""] * 6
        reference = echoed if echo else answer
        for chunk in client.completions.create(model="tiny", prompt=prompts, seed=2, n=2, echo=echo, stream=True):
            for piece in chunk.choices:
                texts[piece.index] += piece.text
        assert texts == [choice.text for choice in reference.choices]


def test_completion_logprobs(client, llm):
    (expected,) = llm.generate(["ab"], SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0].outputs
    answer = client.completions.create(model="tiny", prompt="ab", temperature=0, max_tokens=8, logprobs=2).choices[0]
    values = [table[token].logprob for token, table in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert answer.logprobs.token_logprobs == values
    assert answer.logprobs.tokens == [llm.tokenizer.decode([i], skip_special_tokens=False) for i in expected.token_ids]
    assert len(answer.logprobs.top_logprobs) == len(answer.logprobs.text_offset) == len(values)
    chunks = client.completions.create(model="tiny", prompt="ab", temperature=0, max_tokens=8, logprobs=2, stream=True)
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == answer.logprobs.text_offset


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_has_the_logprobs_of_its_prompt(client, llm, n):
    """As evaluation harnesses score texts; the prompt's are those that it would have as an answer."""
    prompts = ["ab", "Say something longer than one block of KV.", "c"]
    options = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 5, "n": n, "logprobs": 3}
    plain = client.completions.create(**options).choices
    echoed = client.completions.create(**options, echo=True).choices
    # A second time, when the prompts' KV is there.
    assert client.completions.create(**options, echo=True).choices == echoed
    for index, (choice, answer) in enumerate(zip(echoed, plain, strict=True)):
        prompt = prompts[index // n]
        ids = llm.tokenizer.encode(prompt)
        assert choice.text == prompt + answer.text
        logprobs = choice.logprobs
        assert logprobs.tokens == [llm.tokenizer.decode([i]) for i in ids] + answer.logprobs.tokens
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[len(ids) :] == answer.logprobs.token_logprobs
        assert logprobs.text_offset == [*range(len(ids)), *(len(ids) + i for i in answer.logprobs.text_offset)]
        for place in range(1, len(ids)):
            forced = SamplingParams(temperature=0, max_tokens=1, logprobs=3, logit_bias={ids[place]: 100})
            (table,) = llm.generate([ids[:place]], forced)[0].outputs[0].logprobs
            assert logprobs.token_logprobs[place] == table[ids[place]].logprob
            # Parts of characters are spelled alike; the most probable one is listed.
            by_rank = sorted(table.values(), key=lambda entry: entry.rank, reverse=True)
            expected = {entry.decoded_token: entry.logprob for entry in by_rank}
            assert logprobs.top_logprobs[place] == expected
    streamed = {}
    for chunk in client.completions.create(**options, echo=True, stream=True):
        for piece in chunk.choices:
            whole = streamed.setdefault(piece.index, ["", [], [], [], []])
            whole[0] += piece.text
            for place, name in enumerate(("tokens", "token_logprobs", "top_logprobs", "text_offset"), start=1):
                whole[place] += getattr(piece.logprobs, name)
    for choice in echoed:
        found = choice.logprobs
        lists = [found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset]
        assert streamed[choice.index] == [choice.text, *lists]


def test_many_at_once_get_what_each_gets_alone(server, llm):
    expected = [output.outputs[0].text for output in llm.generate([[i, 7] for i in range(24)], _GREEDY)]

    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as client:

            async def one(index):
                options = {"model": "tiny", "prompt": [index, 7], "temperature": 0, "max_tokens": 24}
                if index % 2:
                    return (await client.completions.create(**options)).choices[0].text
                stream = await client.completions.create(**options, stream=True)
                return "".join([piece.text async for chunk in stream for piece in chunk.choices])

            assert await asyncio.gather(*map(one, range(24))) == expected

    asyncio.run(main())
    assert server.is_idle()


_GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_errors_by_type(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="tools") as found:
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (found.value.param, found.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt=[5] * 128)
    assert (found.value.param, found.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 9000}])
    assert (found.value.param, found.value.code) == ("messages", "context_length_exceeded")


def test_api_keys(pair):
    with running(pair[0], api_key="right-key") as server:

        def answer(key):
            client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
            return chat(client, temperature=0, max_tokens=3)

        assert answer("right-key").choices
        for key in ("wrong", "right-kez", "right-key2"):
            with pytest.raises(openai.AuthenticationError) as found:
                answer(key)
            assert found.value.code == "invalid_api_key"
        for header in (b"Bearer k\xc3\xa9y", b"Basic right-key", b"right-key", b"Bearer"):
            assert server.get("/v1/models", headers={"Authorization": header}).status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "bearer right-key"}).status_code == 200
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 401
        assert server.get("/nothing").status_code == 401
        for path in ("/health", "/version", "/metrics"):
            assert server.get(path).status_code == 200
