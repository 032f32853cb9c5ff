"""Speculative rounds give the tokens of plain decoding, whatever the drafter does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from round_cases import (
    Driver,
    ScriptedDrafter,
    plain_runner,
    random_target,
    real_drafter,
    sequences_of,
    speculative_runner,
)

from sparkgap.config import SamplingParams
from sparkgap.models.drafter import Drafter
from sparkgap.ops import TorchKernels
from sparkgap.rounds.sequence import Sequence
from sparkgap.rounds.speculative import CONTEXT_TOO_LONG

GREEDY = SamplingParams(temperature=0, max_tokens=None)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=None)
PENALIZED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={5: 3.0}, max_tokens=None
)
LENGTHS = (5, 17, 1, 30)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_tokens(params: SamplingParams, lengths: tuple[int, ...] = LENGTHS, num_tokens: int = 24) -> list[list[int]]:
    """Tokens of each sequence, decoded plainly and alone."""
    target = random_target()
    sequences = sequences_of(lengths, [params] * len(lengths))
    return [Driver(plain_runner(target)).generate([sequence], num_tokens)[0] for sequence in sequences]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 5])
@pytest.mark.parametrize("chunk", [1000, 4])
def test_random_drafter_changes_no_token(params: SamplingParams, num_speculative_tokens: int, chunk: int) -> None:
    target = random_target()
    drafter = real_drafter(target, markov_rank=6, markov_head_type="rnn")
    driver = Driver(speculative_runner(target, drafter, num_speculative_tokens))
    tokens = driver.generate(sequences_of(LENGTHS, [params] * len(LENGTHS)), 24, chunk)
    assert tokens == plain_tokens(params)


def test_dflash_layout_changes_no_token() -> None:
    target = random_target()
    drafter = real_drafter(target, method="dflash", sample_from_anchor=False)
    driver = Driver(speculative_runner(target, drafter))
    assert driver.generate(sequences_of(LENGTHS, [GREEDY] * 4), 24) == plain_tokens(GREEDY)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
def test_drafters_that_know_the_answer_and_that_never_do(params: SamplingParams) -> None:
    expected = plain_tokens(params, num_tokens=30)
    prompts = sequences_of(LENGTHS, [params] * 4)
    texts = [s.prompt_token_ids + tokens for s, tokens in zip(prompts, expected, strict=True)]

    def right(anchor: int, length: int, number: int) -> list[int]:
        text = next(t for t in texts if len(t) > length and t[length] == anchor)
        return (text[length + 1 :] + [0] * number)[:number]

    def wrong(anchor: int, length: int, number: int) -> list[int]:
        return [(token + 1) % 61 for token in right(anchor, length, number)]

    def half(anchor: int, length: int, number: int) -> list[int]:
        keep = length % (number + 1)
        return right(anchor, length, number)[:keep] + wrong(anchor, length, number)[keep:]

    for script, accepted in ((right, {5}), (wrong, {0}), (half, {0, 1, 2, 3, 4, 5})):
        target = random_target()
        drafter = ScriptedDrafter(real_drafter(target), script)
        driver = Driver(speculative_runner(target, drafter, 5))
        # One sequence at a time: a script finds its text by the anchor alone.
        for index, sequence in enumerate(sequences_of(LENGTHS, [params] * 4)):
            texts_before, texts[:] = list(texts), [texts[index]]
            assert driver.generate([sequence], 24) == [expected[index][:24]]
            texts[:] = texts_before
        rounds = [output for _, output in driver.outputs if output.num_draft_tokens]
        assert {output.num_accepted_tokens for output in rounds} <= accepted
        assert {output.num_accepted_tokens for output in rounds} & accepted
        if script is half:
            assert len({output.num_accepted_tokens for output in rounds}) > 3


def test_logprobs_of_accepted_tokens_are_those_of_plain_decoding() -> None:
    params = SamplingParams(temperature=0, logprobs=3, max_tokens=None)
    target = random_target()
    results = []
    for runner in (plain_runner(target), speculative_runner(target, real_drafter(target), 3)):
        driver = Driver(runner)
        driver.generate(sequences_of(LENGTHS, [params] * 4), 16)
        logprobs = {number: [] for number in range(4)}
        for sequence_id, output in driver.outputs:
            logprobs[sequence_id] += [token.logprobs for token in output.tokens]
        results.append(logprobs)
    for number in range(4):
        for ours, theirs in zip(results[0][number][:16], results[1][number][:16], strict=True):
            assert ours.rank == theirs.rank
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("params", [SAMPLED, PENALIZED], ids=["sampled", "penalized"])
def test_seeded_result_does_not_depend_on_the_batch(params: SamplingParams, method: str) -> None:
    target = random_target()
    drafter = real_drafter(target, markov_rank=6, draft_vocab_size=40)
    together = Driver(speculative_runner(target, drafter, 4, method)).generate(sequences_of(LENGTHS, [params] * 4), 20)
    alone = [
        Driver(speculative_runner(target, drafter, 4, method)).generate([sequence], 20)[0]
        for sequence in sequences_of(LENGTHS, [params] * 4)
    ]
    assert together == alone


def test_greedy_requests_among_probabilistic_ones_keep_their_tokens() -> None:
    target = random_target()
    drafter = real_drafter(target, markov_rank=6)
    params = [GREEDY, SAMPLED, GREEDY, PENALIZED]
    tokens = Driver(speculative_runner(target, drafter, 4, "probabilistic")).generate(sequences_of(LENGTHS, params), 20)
    expected = plain_tokens(GREEDY, num_tokens=20)
    assert tokens[0] == expected[0]
    assert tokens[2] == expected[2]


class RecordingDrafter:
    """Wraps a drafter and keeps, for each slot, the last captured hidden state and position written there."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.written: dict[int, tuple[torch.Tensor, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def context_update(
        self,
        captured: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: Any,
        following: torch.Tensor,
    ) -> None:
        for row, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
            if slot >= 0:
                self.written[slot] = (captured[row].clone(), position)
        self.drafter.context_update(captured, positions, slots, caches, following)


def test_context_kv_after_rounds_is_that_of_one_update_to_the_bit() -> None:
    # Equal row counts in every product: a row's sums are then taken in one order.
    target = random_target()
    target.kernels = TorchKernels(linear_tile_rows=6)
    drafter = RecordingDrafter(real_drafter(target, markov_rank=6))
    runner = speculative_runner(target, drafter, 5)
    sequences = sequences_of(LENGTHS, [GREEDY] * 4)
    Driver(runner).generate(sequences, 24)
    committed = {
        sequence.block_table[p // 4] * 4 + p % 4: p
        for sequence in sequences
        for p in range(sequence.num_computed_tokens)
    }
    assert {slot: position for slot, (_, position) in drafter.written.items()} == committed
    fresh = speculative_runner(target, drafter.drafter, 5).speculation.caches
    drafter.drafter.context_update(
        torch.stack([captured for captured, _ in drafter.written.values()]),
        torch.tensor([position for _, position in drafter.written.values()]),
        torch.tensor(list(drafter.written)),
        fresh,
    )
    for ours, theirs in zip(runner.speculation.caches, fresh, strict=True):
        assert torch.equal(ours.keys.nan_to_num(7.0), theirs.keys.nan_to_num(7.0))
        assert torch.equal(ours.values.nan_to_num(7.0), theirs.values.nan_to_num(7.0))


def test_context_kv_after_rounds_is_that_of_a_prompt_of_the_same_tokens() -> None:
    target = random_target()
    drafter = real_drafter(target, markov_rank=6)
    runner = speculative_runner(target, drafter, 5)
    sequences = sequences_of(LENGTHS, [GREEDY] * 4)
    Driver(runner).generate(sequences, 24)
    fresh = speculative_runner(target, drafter, 5)
    again = Driver(fresh)
    for sequence in sequences:
        length = sequence.num_computed_tokens
        copy = Sequence(sequence.sequence_id, GREEDY, 0, sequence.token_ids(0, length))
        again.prefill([copy])
        for ours, theirs in zip(runner.speculation.caches, fresh.speculation.caches, strict=True):
            for name in ("keys", "values"):
                left = rows_of(getattr(ours, name), sequence.block_table, length)
                right = rows_of(getattr(theirs, name), copy.block_table, length)
                assert torch.allclose(left, right, atol=1e-4)


def rows_of(cache: torch.Tensor, block_table: list[int], length: int) -> torch.Tensor:
    return cache[torch.tensor(block_table)].flatten(0, 1)[:length]


def test_rejected_rows_write_no_context() -> None:
    target = random_target()
    runner = speculative_runner(target, real_drafter(target), 5)
    driver = Driver(runner)
    (sequence,) = sequences_of((9,), [GREEDY])
    driver.prefill([sequence])
    driver.decode([sequence])
    keys = rows_of(runner.speculation.caches[0].keys, sequence.block_table, len(sequence.block_table) * 4)
    assert keys[: sequence.num_computed_tokens].isfinite().all()
    assert keys[sequence.num_computed_tokens :].isnan().all()


def test_sequence_beyond_the_drafters_capacity_takes_plain_rounds_with_the_reason() -> None:
    target = random_target()
    transformer = real_drafter(target).config.backbone
    assert transformer.max_position_embeddings == 96
    drafter = real_drafter(target)
    drafter.max_context_length = 20
    driver = Driver(speculative_runner(target, drafter, 3))
    tokens = driver.generate(sequences_of(LENGTHS, [GREEDY] * 4), 24)
    assert tokens == plain_tokens(GREEDY)
    plain = {number for number, output in driver.outputs if output.not_speculated == CONTEXT_TOO_LONG}
    drafted = {number for number, output in driver.outputs if output.num_draft_tokens}
    assert plain == {0, 1, 2, 3}
    assert drafted == {0, 1, 2}


def test_tokens_up_to_the_end_of_the_context() -> None:
    target = random_target()
    for params in (GREEDY, SAMPLED):
        results = []
        for runner in (plain_runner(target), speculative_runner(target, real_drafter(target), 5, max_model_len=40)):
            driver = Driver(runner, max_model_len=40)
            results.append(driver.generate(sequences_of((5, 17, 33, 39), [params] * 4), 100))
        assert results[0] == results[1]
        assert [len(tokens) for tokens in results[0]] == [35, 23, 7, 1]


def test_drafter_that_gives_nan_is_named_and_target_nan_names_the_model() -> None:
    target = random_target()
    drafter = ScriptedDrafter(real_drafter(target), lambda anchor, length, number: [0] * number, nan=True)
    driver = Driver(speculative_runner(target, drafter, 3))
    sequences = sequences_of((4, 6), [GREEDY] * 2)
    driver.prefill(sequences)
    for output in driver.decode(sequences):
        assert output.error is not None
        assert "drafter tiny" in str(output.error)
    broken = random_target()
    broken.final_norm[0] = torch.nan
    driver = Driver(speculative_runner(broken, real_drafter(broken), 3))
    driver.prefill(sequences_of((4,), [GREEDY]))
    assert "model tiny" in str(driver.outputs[0][1].error)
