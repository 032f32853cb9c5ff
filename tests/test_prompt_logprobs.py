"""Log-probabilities of prompt tokens are those that the same tokens have as output, however the prompt is computed."""

import asyncio

import pytest
from safetensors.torch import load_file, save_file

from sparkgap import LLM, AsyncLLM, SamplingParams
from sparkgap.errors import EngineError

from .tiny_model import write_tiny_model

SETTINGS = {"dtype": "float32", "threads": 1, "device": "cpu", "block_size": 4, "max_model_len": 128}
PROMPT = [7, 250, 3, 3, 90, 41, 8, 9, 120, 17, 66, 5, 200, 31]
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4
"""Of four positions: keys and values of two layers, two heads of eight, four bytes each."""

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(path):
    """Tables of the tokens of `PROMPT` from the second on, each of them an output that a bias forces."""
    llm = LLM(path, enable_prefix_caching=False, **SETTINGS)
    params = [
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3, logit_bias={token: 100})
        for token in PROMPT[1:]
    ]
    outputs = llm.generate([PROMPT[:end] for end in range(1, len(PROMPT))], params)
    assert [output.outputs[0].token_ids for output in outputs] == [[token] for token in PROMPT[1:]]
    return [output.outputs[0].logprobs[0] for output in outputs]


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 5}, {"graphs": "off"}], ids=str)
def test_they_are_those_of_output(path, expected, changes):
    llm = LLM(path, **(SETTINGS | changes))
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone, beside, wanting = llm.generate([PROMPT, PROMPT[:5], PROMPT], [plain, plain, PARAMS])
    assert wanting.prompt_logprobs == [None, *expected]
    assert alone.prompt_logprobs is beside.prompt_logprobs is None
    assert wanting.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_prompt_whose_blocks_are_there_is_computed(path, expected):
    llm = LLM(path, **SETTINGS)
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    (output,) = llm.generate([PROMPT], PARAMS)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs == [None, *expected]
    (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert found.num_cached_tokens == 12


def test_one_token_has_none_before_it(path):
    (output,) = LLM(path, **SETTINGS).generate([[9]], PARAMS)
    assert output.prompt_logprobs == [None]


def test_preempted_sequences_keep_them(path, expected):
    llm = LLM(path, kv_cache_memory_bytes=26 * BLOCK_BYTES, **(SETTINGS | {"max_model_len": 64}))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=3)
    outputs = llm.generate([PROMPT] * 4, params)
    assert llm.stats.num_preemptions > 0
    assert all(output.prompt_logprobs == [None, *expected] for output in outputs)


def test_the_first_output_of_a_stream_has_them(path, expected):
    """Also where the second completion finds the prompt's blocks, and the first computes the prompt in many steps."""

    async def main():
        llm = AsyncLLM(path, max_num_batched_tokens=4, **SETTINGS)
        try:
            async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=1)):
                pass
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, prompt_logprobs=3)
            return [output async for output in llm.generate(PROMPT, params)]
        finally:
            llm.close()

    first, *others = asyncio.run(main())
    assert first.prompt_logprobs == [None, *expected]
    assert all(output.prompt_logprobs is None for output in others)
    tokens = [[], []]
    for output in (first, *others):
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 12


@pytest.mark.parametrize("tokens_at_once", [512, 1])
def test_logits_that_are_no_numbers_within_a_prompt_end_its_request_alone(tmp_path, tokens_at_once):
    """Token 4 makes the last MLP overflow, which no other position's row sees."""
    path = write_tiny_model(tmp_path / "model", seed=1)
    weights = load_file(path / "model.safetensors")
    weights = {name: 0.01 * w if "o_proj" in name or "down_proj" in name else w for name, w in weights.items()}
    weights["model.embed_tokens.weight"][:, 0] = -3
    weights["model.embed_tokens.weight"][4, 0] = 3
    for name in ("gate", "up"):
        weights[f"model.layers.1.mlp.{name}_proj.weight"].zero_()[:, 0] = 1e10
    weights["model.layers.1.mlp.down_proj.weight"].fill_(1e30)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    llm = LLM(str(path), max_num_batched_tokens=tokens_at_once, **(SETTINGS | {"quantization": "none"}))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    llm.generate([[1, 4, 3]], SamplingParams(temperature=0, max_tokens=1))
    before = llm.generate([[1, 2, 3]], params)
    with pytest.raises(EngineError, match="logits that are not finite numbers"):
        llm.generate([[1, 4, 3]], params)
    assert [output.prompt_logprobs for output in llm.generate([[1, 2, 3]], params)] == [before[0].prompt_logprobs]
    assert llm.stats.num_used_blocks == 0
