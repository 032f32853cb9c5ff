"""The default model behind the server, with the `openai` package, and in process."""

import openai
import pytest

from sparkgap import LLM, SamplingParams

from .running import running

pytestmark = pytest.mark.model


def test_answers_are_those_in_process(default_model_path):
    messages = [{"role": "user", "content": "Name three colours."}]
    path = str(default_model_path)
    expected = LLM(path, threads=1).chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    with running(path, engine={"dtype": "auto"}, served_model_name="smollm2-135m") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        options = {"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = client.chat.completions.create(**options, logprobs=True)
        assert answer.choices[0].message.content == expected.text
        spelled = b"".join(bytes(entry.bytes) for entry in answer.choices[0].logprobs.content)
        assert spelled.decode().removesuffix("<|im_end|>") == expected.text
        pieces = [
            piece.delta.content or ""
            for chunk in client.chat.completions.create(**options, stream=True)
            for piece in chunk.choices
        ]
        assert "".join(pieces) == expected.text
        assert server.metric("graph_captures_total", when="since_startup") == 0
        tokens = server.post("/tokenize", {"prompt": "Zürich 日本"}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "Zürich 日本"
