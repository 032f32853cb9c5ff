"""The Python interface on a tiny random model, with transformers as the judge of greedy tokens."""

import subprocess
import sys
import threading

import pytest
import torch
import transformers

from sparkgap import LLM, SamplingParams
from sparkgap.errors import ConfigError, EngineError, PromptError
from sparkgap.graphs.captured import CapturedPasses

from .tiny_model import EOS, VOCAB_SIZE, write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, dtype="float32", threads=1, device="cpu")


def is_idle(llm):
    """Whether nothing is left but, at most, a round that nobody waits for; the next step takes that in."""
    if llm._engine.has_rounds_in_flight:
        assert llm._engine.step() == []
    blocks = llm._engine.scheduler.blocks
    return (
        not llm._engine.has_unfinished_requests() and not llm._outputs and blocks.num_free_blocks == blocks.num_blocks
    )


def test_greedy_tokens_are_those_of_transformers(llm, path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [[1, 2, 3], [200, 4, 4, 9, 30, 77, 1], [256]]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_transformers(llm, path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=4, ignore_eos=True)
    (completion,) = llm.generate([9, 8, 7], params)[0].outputs
    with torch.no_grad():
        logits = model(torch.tensor([[9, 8, 7, *completion.token_ids]])).logits[0, 2:-1].log_softmax(-1)
    total = 0.0
    for row, token, table in zip(logits, completion.token_ids, completion.logprobs, strict=True):
        best = row.topk(4)
        assert set(table) == {token, *best.indices.tolist()}
        assert [table[i].rank for i in best.indices.tolist()] == [1, 2, 3, 4]
        for token_id, logprob in table.items():
            assert logprob.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        total += row[token].item()
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_forms_of_prompts(llm):
    ids = llm.tokenizer.encode("hello")
    expected = llm.generate("hello", GREEDY)[0].outputs[0]
    forms = [ids, [ids], ["hello"], {"prompt": "hello"}, {"prompt_token_ids": ids}, tuple(ids)]
    for form in forms:
        (output,) = llm.generate(form, GREEDY)
        assert output.outputs[0] == expected
        assert output.prompt_token_ids == ids
    mixed = llm.generate(["hello", ids, {"prompt": "hello"}], [GREEDY] * 3)
    assert [output.outputs[0] for output in mixed] == [expected] * 3
    assert llm.generate([]) == []


@pytest.mark.parametrize("bad", [5, None, {"text": "a"}, {}, [{"prompt": 3}], [None], [b"abc"], b"abc", {1}])
def test_what_is_no_prompt_is_refused(llm, bad):
    with pytest.raises(PromptError):
        llm.generate(bad, GREEDY)
    assert is_idle(llm)


def test_one_bad_prompt_computes_nothing(llm):
    with pytest.raises(PromptError, match="128"):
        llm.generate(["fine", [1] * 128], GREEDY)
    assert is_idle(llm)


def test_params_must_match_prompts(llm):
    with pytest.raises(ConfigError, match="2 prompts and 3 sampling_params"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_completions_and_seeds(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("x", params)
    texts = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(t) for t in texts}) == 3
    (single,) = llm.generate("x", SamplingParams(seed=7, max_tokens=12, ignore_eos=True))
    assert single.outputs[0].token_ids == texts[0]
    assert output.metrics.completion_tokens == 36


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    made = [LLM(path, dtype="float32", threads=1, seed=seed) for seed in (0, 0, 1)]
    tokens = [[o.outputs[0].token_ids for o in llm.generate(["x", "x"], params)] for llm in made]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] != tokens[0][1]


def test_stream_adds_up_to_generate(llm):
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, logprobs=1, n=2)
    (whole,) = llm.generate("abc", params)
    outputs = list(llm.stream("abc", params))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].metrics.completion_tokens == 60
    for completion in whole.outputs:
        pieces = [p for output in outputs for p in output.outputs if p.index == completion.index]
        assert "".join(piece.text for piece in pieces) == completion.text
        assert [t for piece in pieces for t in piece.token_ids] == completion.token_ids
        assert [t for piece in pieces for t in piece.logprobs] == completion.logprobs
        assert pieces[-1].finish_reason == completion.finish_reason


def test_streams_may_be_interleaved_closed_and_dropped(llm):
    expected = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    first, second, dropped = (llm.stream("abc", GREEDY) for _ in range(3))
    never_started = llm.stream("abc", GREEDY)
    tokens = [*next(first).outputs[0].token_ids, *next(first).outputs[0].token_ids]
    next(second)
    next(dropped)
    second.close()
    del dropped, never_started
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == expected
    for output in first:
        tokens += output.outputs[0].token_ids
    assert tokens == expected
    assert is_idle(llm)


def test_stream_checks_its_prompt_at_once(llm):
    with pytest.raises(PromptError):
        llm.stream("")
    with pytest.raises(ConfigError):
        llm.stream("a", SamplingParams(stop_token_ids=[VOCAB_SIZE]))


def test_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer.encode("<s>user: hi</s><s>assistant:")
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids
    assert output.outputs == llm.generate(ids, GREEDY)[0].outputs
    several = llm.chat([messages, messages], GREEDY)
    assert [o.outputs for o in several] == [output.outputs] * 2
    streamed = [t for o in llm.stream_chat(messages, GREEDY) for t in o.outputs[0].token_ids]
    assert streamed == output.outputs[0].token_ids
    (bare,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert bare.prompt_token_ids == llm.tokenizer.encode("<s>user: hi</s>")


def test_threads_share_the_engine(llm):
    prompts = [[i, i + 1] for i in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    results = [None] * 6

    def work(index):
        results[index] = llm.generate(prompts[index], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected
    assert is_idle(llm)


def test_a_failure_in_computing_is_raised_and_leaves_the_engine_usable(llm, monkeypatch):
    def broken(self, batch):
        raise MemoryError("no memory")

    prefill = CapturedPasses.prefill
    monkeypatch.setattr(CapturedPasses, "prefill", broken)
    with pytest.raises(EngineError, match=r"tiny.*MemoryError: no memory"):
        llm.generate(["a", "b"], GREEDY)
    with pytest.raises(EngineError):
        list(llm.stream("a", GREEDY))
    monkeypatch.setattr(CapturedPasses, "prefill", prefill)
    assert is_idle(llm)
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 20


def test_an_interrupt_leaves_the_engine_usable(llm, monkeypatch):
    step = llm._engine.step
    calls = iter(range(3))

    def interrupted():
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert is_idle(llm)


def test_info(llm, path):
    info = llm.info()
    assert info["model"] == path
    assert (info["dtype"], info["device"], info["threads"]) == ("float32", "cpu", 1)
    assert (info["vocab_size"], info["eos_token_ids"], info["max_model_len"]) == (VOCAB_SIZE, [EOS], 128)
    assert info["kv_cache_tokens"] == 16 * 128
    assert info["kv_cache_bytes"] == 16 * 128 * 2 * 2 * 2 * 8 * 4
    assert torch.get_num_threads() == 1


def test_progress_bar(llm, capfd):
    llm.generate(["a", "b"], GREEDY, use_progress=True)
    assert "2/2" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_modle_len": 3}, "'max_modle_len'; did you mean max_model_len"),
        ({"zzz": 3}, "'zzz'"),
        ({"max_model_len": 129}, r"129, and model .* has 128 positions"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes 1000 holds 0 positions.*needs 16384 bytes"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "nonsense"}, "device must be"),
        ({"graphs": "always"}, "graphs must be one of auto, on, off, got 'always'"),
        ({"graphs": 1}, "graphs must be one of"),
        ({"graphs": "on", "dtype": "float16", "device": "cpu"}, "graphs on needs .* native kernels.*graphs off"),
        ({"device": "cuda"}, "device cuda is not usable"),
    ],
)
def test_settings_that_are_refused(path, settings, match):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ConfigError, match=match):
        LLM(path, **settings)


def test_dtypes_and_the_automatic_one(path):
    for dtype, expected in (("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        llm = LLM(path, dtype=dtype, threads=1)
        assert llm.info()["dtype"] == expected
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 20


def test_the_package_imports_no_torch():
    code = "import sys, sparkgap; sparkgap.SamplingParams; sparkgap.EngineConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_lists_and_loads_its_names():
    import sparkgap

    assert {name for name in sparkgap.__all__ if getattr(sparkgap, name) is None} == set()
    assert set(sparkgap.__all__) <= set(dir(sparkgap))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sparkgap.nonsense


def test_a_stream_that_is_collected_in_the_middle_of_a_step_disturbs_nobody(llm):
    """The garbage collector may close a stream anywhere, also in the thread that is computing a step."""
    expected = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    other = llm.stream([7, 7], GREEDY)
    next(other)
    stream = llm.stream([1, 2, 3], GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    consume = llm._engine.runner.consume

    def close_then_consume():
        other.close()
        return consume()

    llm._engine.runner.consume = close_then_consume
    try:
        for output in stream:
            tokens += output.outputs[0].token_ids
    finally:
        llm._engine.runner.consume = consume
    assert tokens == expected
    assert is_idle(llm)


def test_an_interrupt_leaves_the_other_streams_running(llm):
    expected = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    survivor = llm.stream([1, 2, 3], GREEDY)
    tokens = list(next(survivor).outputs[0].token_ids)
    consume = llm._engine.runner.consume

    def interrupted():
        consume()
        raise KeyboardInterrupt

    llm._engine.runner.consume = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([9, 9], GREEDY)
    finally:
        llm._engine.runner.consume = consume
    for output in survivor:
        tokens += output.outputs[0].token_ids
    assert tokens == expected
    assert is_idle(llm)


@pytest.mark.parametrize("params", [5, [None], {"n": 1}])
def test_sampling_params_of_another_type(llm, params):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ConfigError, match="sampling_params must be"):
            call([1], params)


@pytest.mark.parametrize("messages", [None, 5, "hi", [], [[]], {"role": "user", "content": "x"}, iter([])])
def test_messages_of_another_type(llm, messages):
    with pytest.raises(PromptError, match="messages must be a"):
        llm.chat(messages)


def test_template_variables_may_have_any_name(llm):
    messages = [{"role": "user", "content": "x"}]
    plain = llm.chat(messages, GREEDY)[0].prompt_token_ids
    assert llm.chat(messages, GREEDY, template="x", tools=[], loop=1, range=2)[0].prompt_token_ids == plain
