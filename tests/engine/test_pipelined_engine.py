"""The task pipeline as a state machine: requests come, go, fail and are cancelled in any order of steps."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sparkgap import LLM, SamplingParams
from sparkgap.rounds.pipeline import pipeline as pipeline_module

from ..speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 64, "max_num_seqs": 3, "block_size": 4}
PROMPTS = ("hello", "zq", "a longer prompt of more rows", "b")
PARAMS = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, stop=["a", "e", "x"]),
    SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=20, n=2),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, frequency_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, speculation=False),
    SamplingParams(temperature=0, max_tokens=16, min_tokens=12),
)
FAILURES = ("prepare", "launch", "kernel", "copy", "consume")


class Models:
    """Two engines for all examples: one with the pipeline, and one that computes everything eagerly."""

    def __init__(self, directory: Path) -> None:
        model, drafter = write_looping_pair(directory)
        config = {"model": str(drafter), "num_speculative_tokens": 3}
        # Room for two sequences at their longest, so that the third has to give way.
        self.chained = LLM(
            str(model), task_pipeline="on", speculative_config=config, kv_cache_memory_bytes=1 << 15, **SETTINGS
        )
        self._eager = LLM(str(model), graphs="off", **SETTINGS)
        self._known: dict[tuple[str, int], list[list[int]]] = {}

    def expected(self, prompt: int, params: int) -> list[list[int]]:
        """Tokens of each completion."""
        key = (prompt, params)
        if key not in self._known:
            (output,) = self._eager.generate([PROMPTS[prompt]], PARAMS[params])
            self._known[key] = [completion.token_ids for completion in output.outputs]
        return self._known[key]


class Machine(RuleBasedStateMachine):
    """How far an engine gets in a step depends on the clock, so what is drawn may not depend on it."""

    models: Models

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.models.chained._engine
        self.runner = self.engine._pipelined
        self.pipeline = self.runner.pipeline
        self.wanted: dict[str, list[list[int]]] = {}
        self.given: dict[str, list[list[int]]] = {}
        self.injected: list[tuple[object, str]] = []
        self.may_fail = False
        self.number = 0

    @initialize()
    def begin(self) -> None:
        assert not self.engine.has_unfinished_requests()
        assert not self.pipeline.rounds

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), params=st.integers(0, len(PARAMS) - 1))
    def submit(self, prompt: int, params: int) -> None:
        request_id = f"r{self.number}"
        self.number += 1
        wanted = self.models.expected(prompt, params)
        self.engine.add_request(PROMPTS[prompt], PARAMS[params], request_id=request_id)
        self.wanted[request_id] = wanted
        self.given[request_id] = [[] for _ in wanted]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if not self.wanted:
            return
        request_id = sorted(self.wanted)[which % len(self.wanted)]
        output = self.engine.abort(request_id)
        if output is not None:
            self.append(output)
        self.assert_prefix(request_id)
        del self.wanted[request_id], self.given[request_id]

    @rule(place=st.sampled_from(FAILURES), slot=st.integers(0, 1))
    def fail(self, place: str, slot: int) -> None:
        """The next time that something comes by the place, it fails."""
        self.clear_injections()
        self.may_fail = True
        stage, target = self.pipeline.slots[slot].stage, self.pipeline.slots[slot]

        def broken(*arguments: object) -> None:
            self.clear_injections()
            if place in ("prepare", "kernel"):
                stage(*arguments)
            if place == "kernel":
                target.block_tables[0].fill_(10**6)
                return
            if place == "consume":
                type(self.pipeline).consume(self.pipeline)
            raise RuntimeError("injected")

        where = {
            "prepare": (target, "stage"),
            "kernel": (target, "stage"),
            "launch": (self.pipeline.stream, "launch"),
            "copy": (target, "read_results"),
            "consume": (self.pipeline, "consume"),
        }[place]
        setattr(*where, broken)
        self.injected.append(where)

    @invariant()
    def nothing_is_lost_or_duplicated(self) -> None:
        for request_id in self.wanted:
            self.assert_prefix(request_id)
        assert len(self.pipeline.rounds) <= 2
        slots = [round_.slot for round_ in self.pipeline.rounds]
        assert len(set(slots)) == len(slots)
        held = {b for _, c in self.engine._owners.values() for b in c.sequence.block_table}
        held |= {b for s in self.engine.scheduler._retired for b in s.block_table}
        blocks = self.engine.scheduler.blocks
        assert len(held) + blocks.num_free_blocks == blocks.num_blocks
        for round_ in self.pipeline.rounds:
            # Whoever a round writes for still has its blocks.
            assert all(sequence.block_table for sequence in round_.sequences)

    def teardown(self) -> None:
        self.clear_injections()
        for _ in range(400):
            if not self.engine.has_unfinished_requests():
                break
            self.take(self.engine.step())
        assert not self.wanted
        while self.pipeline.rounds:
            self.engine._consume()
        blocks = self.engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks

    def clear_injections(self) -> None:
        while self.injected:
            owner, name = self.injected.pop()
            delattr(owner, name)

    def take(self, outputs: list) -> None:
        for output in outputs:
            self.append(output)
            request_id = output.request_id
            self.assert_prefix(request_id)
            if output.error is not None:
                assert self.may_fail
                assert "injected" in str(output.error) or "outside the KV cache" in str(output.error)
            elif output.finished:
                assert self.given[request_id] == self.wanted[request_id]
            if output.finished:
                del self.wanted[request_id], self.given[request_id]

    def append(self, output: object) -> None:
        for completion in output.outputs:
            self.given[output.request_id][completion.index] += completion.token_ids

    def assert_prefix(self, request_id: str) -> None:
        for given, wanted in zip(self.given[request_id], self.wanted[request_id], strict=True):
            assert given == wanted[: len(given)]


@pytest.mark.parametrize("failing", [False, True])
def test_any_order(monkeypatch, failing):
    monkeypatch.setattr(pipeline_module, "DEADLINE_S", 60.0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:

        class Chosen(Machine):
            models = Models(Path(directory))
            if not failing:
                fail = None

        try:
            run_state_machine_as_test(Chosen, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))
        finally:
            # Hypothesis keeps the class.
            del Chosen.models
