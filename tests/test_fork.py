"""A process that forks with a loaded model: its child is told, ends, and may load a model of its own."""

import subprocess
import sys

import pytest

from .speculating_model import write_looping_pair

SCRIPT = """
import gc, multiprocessing, os, signal, sys, threading
from sparkgap import LLM, SamplingParams
from sparkgap.errors import EngineClosedError

model, drafter, task_pipeline = sys.argv[1:]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
config = {"model": drafter} if task_pipeline == "on" else None


def load():
    return LLM(
        model, threads=2, device="cpu", max_model_len=96, max_num_seqs=1, task_pipeline=task_pipeline,
        speculative_config=config,
    )


def refused(use):
    try:
        use()
    except EngineClosedError as error:
        assert "forked" in str(error) and "load the model here" in str(error), error
    else:
        raise AssertionError("a forked process used the engine")


def check_child():
    refused(lambda: llm.generate("x", GREEDY))
    refused(lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY))
    refused(lambda: next(llm.stream("x", GREEDY)))
    refused(lambda: llm.hidden_states([1]))
    refused(lambda: next(begun))
    assert llm.info()["vocab_size"] and llm.tokenizer.encode("x")


def fork(work):
    child = os.fork()
    if not child:
        signal.alarm(60)
        work()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def use_another():
    other = load()
    assert tokens(other) == expected


def drop():
    global llm, begun
    del llm, begun
    gc.collect()


def tokens(llm):
    return llm.generate("hello", GREEDY)[0].outputs[0].token_ids


llm = load()
expected = tokens(llm)
begun = llm.stream("hello", GREEDY)  # has rounds in flight where there is a pipeline
next(begun)
fork(check_child)
fork(use_another)
fork(drop)
with llm._lock:
    holding, ended = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: holding.set() or [tokens(llm) for _ in iter(ended.is_set, True)])
thread.start()
holding.wait()
for _ in range(3):
    fork(check_child)
ended.set()
thread.join()
process = multiprocessing.get_context("fork").Process(target=check_child)
process.start()
process.join(60)
assert process.exitcode == 0
rest = [output.outputs[0].token_ids for output in begun]
assert [token for ids in rest for token in ids] == expected[-sum(map(len, rest)):]
assert tokens(llm) == expected
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there are no forks")
@pytest.mark.parametrize("task_pipeline", ["on", "off"])
def test_a_fork_is_told_and_ends(tmp_path, task_pipeline):
    model, drafter = write_looping_pair(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(model), str(drafter), task_pipeline]
    done = subprocess.run(command, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nanobind" not in done.stderr
