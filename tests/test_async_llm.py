"""`AsyncLLM` on a tiny random model, with `LLM` as the judge."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sparkgap import LLM, AsyncLLM, SamplingParams
from sparkgap.errors import ConfigError, EngineClosedError, EngineDeadError, EngineError, PromptError, QueueFullError

from .tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def judge(path):
    return LLM(path, dtype="float32", threads=1, device="cpu")


@pytest.fixture
def llm(path):
    made = AsyncLLM(path, dtype="float32", threads=1, device="cpu", max_num_seqs=4)
    yield made
    made.close()


async def tokens_of(outputs):
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def slow_down(llm):
    """Let a tiny model's requests last as long as a test needs to look at them."""
    step = llm._engine.step

    def slow_step():
        time.sleep(0.005)
        return step()

    llm._engine.step = slow_step


def is_idle(llm):
    return llm.num_unfinished_seqs == llm.stats.num_requests == llm.stats.num_used_blocks == 0


def test_tokens_are_those_of_llm(llm, judge):
    prompts = [[i, i + 1] for i in range(9)]
    sampled = SamplingParams(seed=5, max_tokens=15, n=2, logprobs=2)
    expected = [output.outputs for output in judge.generate(prompts, [GREEDY, *[sampled] * 8])]

    async def main():
        async def whole(prompt, params):
            (output,) = [o async for o in llm.generate(prompt, params, output_kind="final")]
            return output.outputs

        results = await asyncio.gather(*[whole(p, GREEDY if i == 0 else sampled) for i, p in enumerate(prompts)])
        assert results == expected
        assert await tokens_of(llm.generate(prompts[0], GREEDY)) == expected[0][0].token_ids
        assert is_idle(llm)

    asyncio.run(main())
    # Another event loop, later.
    assert asyncio.run(tokens_of(llm.generate(prompts[0], GREEDY))) == expected[0][0].token_ids


def test_two_event_loops_at_once(llm, judge):
    slow_down(llm)

    expected = judge.generate([3, 4], LONG)[0].outputs[0].token_ids
    results = [None, None]

    def work(index):
        results[index] = asyncio.run(tokens_of(llm.generate([3, 4], LONG)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected, expected]


def test_chat_and_long_texts(llm, judge):
    messages = [{"role": "user", "content": "hi"}]
    expected = judge.chat(messages, GREEDY)[0].outputs[0].token_ids

    async def main():
        assert await tokens_of(llm.chat(messages, GREEDY)) == expected
        with pytest.raises(PromptError, match="the prompt has 5000 tokens and max_model_len is 128"):
            await tokens_of(llm.generate("x" * 5000))
        with pytest.raises(PromptError, match="messages must be"):
            await tokens_of(llm.chat([], GREEDY))
        outputs = [output async for output in llm.generate("abc", GREEDY)]
        assert outputs[-1].prompt == "abc"
        assert outputs[-1].metrics.completion_tokens == 20

    asyncio.run(main())


def test_a_reader_that_leaves_ends_its_request(llm):
    slow_down(llm)

    async def main():
        outputs = llm.generate([1], LONG)
        await anext(outputs)
        await outputs.aclose()
        await until(lambda: is_idle(llm))

        async def read():
            await tokens_of(llm.generate([1], SamplingParams(max_tokens=100, n=6, ignore_eos=True)))

        task = asyncio.create_task(read())
        await until(lambda: llm.stats.num_running_sequences == 4 and llm.stats.num_waiting_sequences == 2)
        task.cancel()
        await until(lambda: is_idle(llm))

        outputs = llm.generate([1], LONG)
        await anext(outputs)
        del outputs
        gc.collect()
        await until(lambda: is_idle(llm))

    asyncio.run(main())


def test_abort_gives_a_last_output(llm):
    slow_down(llm)

    async def main():
        outputs = llm.generate([1], LONG, request_id="mine")
        await anext(outputs)
        llm.abort("mine")
        llm.abort("nobody's")
        last = [output async for output in outputs][-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        await until(lambda: is_idle(llm))

    asyncio.run(main())


def test_request_ids_are_unique_while_they_run(llm):
    slow_down(llm)

    async def main():
        first = llm.generate([1], LONG, request_id="one")
        await anext(first)
        with pytest.raises(ConfigError, match="request id one is in use"):
            await anext(llm.generate([1], GREEDY, request_id="one"))
        await first.aclose()
        await until(lambda: is_idle(llm))
        assert len(await tokens_of(llm.generate([1], GREEDY, request_id="one"))) == 20

    asyncio.run(main())


def test_several_requests_in_one_stream(llm, judge):
    expected = [output.outputs[0].token_ids for output in judge.generate([[1], [2], [3]], GREEDY)]

    async def main():
        requests = [await llm.prepare([i], GREEDY, request_id=str(i)) for i in (1, 2, 3)]
        tokens = {"1": [], "2": [], "3": []}
        async for output in llm.start(*requests):
            tokens[output.request_id] += output.outputs[0].token_ids
        assert list(tokens.values()) == expected

    asyncio.run(main())


def test_drain_finishes_what_runs_and_takes_nothing_new(llm):
    slow_down(llm)

    async def main():
        task = asyncio.create_task(tokens_of(llm.generate([1], LONG)))
        await until(lambda: llm.num_unfinished_seqs == 1)
        drained = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError):
            await anext(llm.generate([1], GREEDY))
        await drained
        await until(lambda: is_idle(llm))
        assert len(await task) == 100

    asyncio.run(main())


def test_a_request_that_fails_in_computing_fails_alone(path, judge, monkeypatch):
    llm = AsyncLLM(path, dtype="float32", threads=1, device="cpu", graphs="off")
    runner = llm._engine.runner
    prefill = runner.prefill

    def broken(chunks):
        raise MemoryError("no memory")

    async def main():
        monkeypatch.setattr(runner, "prefill", broken)
        with pytest.raises(EngineError, match="MemoryError: no memory"):
            await tokens_of(llm.generate([1], GREEDY))
        monkeypatch.setattr(runner, "prefill", prefill)
        assert llm.error is None
        assert await tokens_of(llm.generate([1], GREEDY)) == judge.generate([1], GREEDY)[0].outputs[0].token_ids

    asyncio.run(main())
    llm.close()


def test_an_engine_that_dies_fails_all_requests_and_takes_no_more(llm, monkeypatch):
    slow_down(llm)

    async def main():
        tasks = [asyncio.create_task(tokens_of(llm.generate([i], LONG))) for i in range(6)]
        await until(lambda: llm.stats.num_generated_tokens > 20)
        monkeypatch.setattr(llm._engine, "step", lambda: 1 / 0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert "ZeroDivisionError" in str(llm.error)
        with pytest.raises(EngineDeadError):
            await anext(llm.generate([1], GREEDY))
        assert llm.num_unfinished_seqs == 0
        assert llm.stalled_for_s() == 0

    asyncio.run(main())


def test_a_stalled_engine_is_noticed(llm, monkeypatch):
    step, go_on = llm._engine.step, threading.Event()

    async def main():
        assert llm.stalled_for_s() == 0
        task = asyncio.create_task(tokens_of(llm.generate([1], GREEDY)))
        await until(lambda: llm.stalled_for_s() > 0.1)
        assert llm.num_unfinished_seqs == 1
        go_on.set()
        await task
        await until(lambda: llm.stalled_for_s() == 0)

    def hanging():
        go_on.wait(20)
        return step()

    monkeypatch.setattr(llm._engine, "step", hanging)
    asyncio.run(main())


def test_an_engine_that_steps_without_effect_is_stalled_too(llm, monkeypatch):
    step, does_nothing = llm._engine.step, True
    monkeypatch.setattr(llm._engine, "step", lambda: [] if does_nothing else step())

    async def main():
        nonlocal does_nothing
        task = asyncio.create_task(tokens_of(llm.generate([1], GREEDY)))
        await until(lambda: llm.stalled_for_s() > 0.1)
        does_nothing = False
        await task

    asyncio.run(main())


def test_close_ends_what_runs(path):
    async def main():
        async with AsyncLLM(path, dtype="float32", threads=1, device="cpu") as llm:
            slow_down(llm)
            outputs = llm.generate([1], LONG)
            await anext(outputs)
            other = asyncio.create_task(tokens_of(llm.generate([2], LONG)))
            await until(lambda: llm.num_unfinished_seqs == 2)
        with pytest.raises(EngineClosedError):
            await tokens_of(outputs)
        with pytest.raises(EngineClosedError):
            await other
        for prompt in ([1], "x" * 5000):
            with pytest.raises(EngineClosedError):
                await anext(llm.generate(prompt, GREEDY))

    asyncio.run(main())


@pytest.mark.parametrize("prompt", ["x", "x" * 5000])
def test_a_forked_process_is_told_that_the_engine_is_elsewhere(llm, prompt):
    with pytest.raises(PromptError):
        asyncio.run(llm.generate("x" * 5000, GREEDY).__anext__())  # starts the thread that encodes
    process = os.fork()
    if not process:
        signal.alarm(20)
        status = 1
        try:
            asyncio.run(anext(llm.generate(prompt, GREEDY)))
        except EngineClosedError as error:
            status = 0 if "forked" in str(error) and llm._thread.stop() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert len(asyncio.run(tokens_of(llm.generate("x", GREEDY)))) == 20


def test_an_engine_that_nobody_closes_ends_with_its_owner(path):
    llm = AsyncLLM(path, dtype="float32", threads=1, device="cpu")
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("prompt", ["", [], [9999], 5, [1] * 128])
def test_bad_prompts(llm, prompt):
    with pytest.raises(PromptError):
        asyncio.run(tokens_of(llm.generate(prompt, GREEDY)))
    assert is_idle(llm)


def test_a_request_that_the_engine_does_not_take(path):
    async def main():
        settings = {"dtype": "float32", "threads": 1, "device": "cpu", "max_num_seqs": 1, "max_queued_requests": 0}
        async with AsyncLLM(path, **settings) as llm:
            slow_down(llm)
            first = asyncio.create_task(tokens_of(llm.generate([1], LONG)))
            await until(lambda: llm.stats.num_running_sequences == 1)
            with pytest.raises(QueueFullError):
                await tokens_of(llm.generate([1], GREEDY))
            assert len(await first) == 100
            assert len(await tokens_of(llm.generate([1], GREEDY))) == 20

    asyncio.run(main())


def test_info(llm):
    assert llm.info()["max_model_len"] == llm.max_model_len == 128
    assert llm.graph_counts()["captures_since_startup"] == 0
    assert llm.config.max_num_seqs == 4


def test_a_program_that_forgets_to_close_ends_as_usual(path):
    code = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from sparkgap import AsyncLLM, SamplingParams
llm = AsyncLLM({path!r}, threads=1, device="cpu")
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
async def begin():
    streams = [llm.start(await llm.prepare(prompt, params)) for prompt in ("hello", "zq", "abc")]
    assert (await anext(streams[0])).outputs[0].token_ids
    return streams
streams = asyncio.run(begin())
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=600, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
