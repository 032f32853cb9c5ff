"""Sequences that cross an edge while they speculate, with a drafter that is always right where its context is.

Tokens are compared with the target's definition, and every round gives N + 1 tokens before the edge and after it, of
the sequence that crosses it and of those beside it.
"""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgap import LLM, SamplingParams
from sparkgap.config import EXECUTION_MODES
from sparkgap.graphs.family import buckets_up_to

from .counting_model import BLOCK_SIZE, answer_to, prompt_of, write_counting_pair

WIDTH = BLOCK_SIZE + 1
SETTINGS: Mapping[str, Any] = {"threads": 1, "device": "cpu", "dtype": "float32", "block_size": 4}
MODES = ("eager", "masked", "pipeline")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_counting_pair(tmp_path_factory.mktemp("counting"), max_model_len=160)


def make(pair: tuple[Path, Path], mode: str, **changes: Any) -> LLM:
    config = {"model": str(pair[1]), "num_speculative_tokens": BLOCK_SIZE, "prompt_lookup_max": 0}
    return LLM(str(pair[0]), speculative_config=config, **(dict(SETTINGS) | dict(EXECUTION_MODES[mode]) | changes))


class Run:
    """Requests given to an engine one by one; the tokens that each of their rounds gave."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm._engine
        self.prompts: dict[str, list[int]] = {}
        self.rounds: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.running: set[str] = set()

    def add(self, prompt: list[int], max_tokens: int | None) -> str:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = self.engine.add_request(prompt, params)
        self.prompts[name], self.rounds[name], self.tokens[name] = prompt, [], []
        self.running.add(name)
        return name

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None
            (completion,) = output.outputs
            self.rounds[output.request_id].append(len(completion.token_ids))
            self.tokens[output.request_id] += completion.token_ids
            if output.finished:
                self.running.discard(output.request_id)

    def finish(self) -> None:
        while self.running:
            self.step()

    def assert_right(self) -> None:
        for name, prompt in self.prompts.items():
            assert self.tokens[name] == answer_to(prompt, len(self.tokens[name]))

    def assert_full_rounds(self, *names: str) -> None:
        """The first token is the prompt's, and the last round may be cut."""
        for name in names or tuple(self.rounds):
            first, *rounds, last = self.rounds[name]
            assert first == 1
            assert rounds == [WIDTH] * len(rounds)
            assert 1 <= last <= WIDTH


@pytest.mark.parametrize("mode", MODES)
def test_the_drafter_reads_its_context(pair: tuple[Path, Path], mode: str) -> None:
    """What these tests stand on: without the right context, drafts are wrong."""
    llm = make(pair, mode)
    run = Run(llm)
    name = run.add(prompt_of(20, 1), 60)
    while len(run.rounds[name]) < 4:
        run.step()
    if llm._loaded.pipeline is not None:
        llm._loaded.pipeline.reset()
    assert llm._loaded.passes.drafting is not None
    with torch.inference_mode():
        for cache in llm._loaded.passes.drafting.caches:
            cache.values.zero_()
    run.finish()
    run.assert_right()
    first, *rounds = run.rounds[name]
    assert first == 1
    assert rounds[:3] == [WIDTH] * 3
    assert rounds[3] < WIDTH
    # What was lost lies too far back after a few tokens.
    assert WIDTH in rounds[4:]


@pytest.mark.parametrize("mode", MODES)
def test_the_edge_of_a_kv_block(pair: tuple[Path, Path], mode: str) -> None:
    """At every distance of the round's first row from it."""
    llm = make(pair, mode, max_num_seqs=4)
    run = Run(llm)
    for length in range(9, 9 + 12):
        run.add(prompt_of(length, length), 50)
    run.finish()
    run.assert_right()
    run.assert_full_rounds()


@pytest.mark.parametrize("mode", MODES)
def test_the_edge_of_a_bucket(pair: tuple[Path, Path], mode: str) -> None:
    """Sequences join one by one up to the largest number and leave one by one, while the first goes on."""
    most = 12
    assert buckets_up_to(most)[-4:] == (7, 8, 10, 12)
    llm = make(pair, mode, max_num_seqs=most)
    run = Run(llm)
    run.add(prompt_of(8, 0), 150)
    for number in range(1, most):
        run.step()
        # Those that came last leave first, two rounds apart.
        run.add(prompt_of(8 + number, number), 1 + WIDTH * (2 * (most - number)))
    run.finish()
    run.assert_right()
    run.assert_full_rounds()
    assert llm.graph_counts()["captures_since_startup"] == 0
    assert llm.graph_counts()["eager"] == {} or mode == "eager"


@pytest.mark.parametrize("mode", MODES)
def test_the_drafters_capacity(tmp_path: Path, mode: str) -> None:
    pair = write_counting_pair(tmp_path, max_model_len=160, max_context=60)
    llm = make(pair, mode, max_num_seqs=3)
    capacity = llm.info()["speculation"]["max_context_length"]
    assert capacity == 60
    run = Run(llm)
    # The others stay below it.
    long, *others = run.add(prompt_of(30, 1), 60), run.add(prompt_of(8, 2), 46), run.add(prompt_of(9, 3), 45)
    run.finish()
    run.assert_right()
    run.assert_full_rounds(*others)
    rounds = run.rounds[long]
    full = [number for number, count in enumerate(rounds) if count == WIDTH]
    # Rounds whose context is at most as long as the capacity: each begins where the one before ended.
    assert full == list(range(1, 1 + -(-(capacity + 1 - 30) // WIDTH)))
    assert rounds[len(full) + 1 :] == [1] * (60 - 1 - WIDTH * len(full))


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_the_context(pair: tuple[Path, Path], mode: str) -> None:
    """At every place of a block, beside a sequence that goes on."""
    llm = make(pair, mode, max_model_len=64, max_num_seqs=3)
    run = Run(llm)
    going_on = [run.add(prompt_of(8, 0), 50)]
    for length in range(40, 40 + WIDTH):
        run.add(prompt_of(length, length), None)
    run.finish()
    run.assert_right()
    run.assert_full_rounds()
    for name, prompt in run.prompts.items():
        if name not in going_on:
            assert len(prompt) + len(run.tokens[name]) == 64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "pipeline"])
def test_position_32768(tmp_path: Path, mode: str) -> None:
    """Beside a short sequence; where rotary tables, 16-bit numbers and other engines' contexts end."""
    edge = 32_768
    pair = write_counting_pair(tmp_path, max_model_len=edge + 128)
    llm = make(pair, mode, block_size=64, max_num_seqs=2)
    run = Run(llm)
    before = -(-40 // WIDTH)
    prompt = prompt_of(edge - before * WIDTH - 2, 1)
    long = run.add(prompt, 2 * before * WIDTH)
    while not run.tokens[long]:
        run.step()
    short = run.add(prompt_of(8, 2), before * WIDTH)
    run.finish()
    run.assert_right()
    run.assert_full_rounds()
    assert len(prompt) + len(run.tokens[long]) > edge + 30
    assert len(run.rounds[short]) > before
    del llm, run
    gc.collect()
