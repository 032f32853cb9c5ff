"""What is found in a sequence's past, and that verifying it changes no token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from round_cases import EOS, Driver, caches_for, plain_runner, random_target, sequences_of

from sparkgap.config import SamplingParams
from sparkgap.rounds.lookup import NOT_FOUND, LookupRunner, PromptLookup
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Sequence
from sparkgap.rounds.verifying import SWITCHED_OFF

GREEDY = SamplingParams(temperature=0, max_tokens=None)
SAMPLED = SamplingParams(temperature=0.3, top_k=3, max_tokens=None)
PENALIZED = SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={5: 3.0}, max_tokens=None)
LENGTHS = (5, 17, 1, 30)


def naive(tokens: list[int], shortest: int, longest: int, count: int) -> tuple[int, ...] | None:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if len(tokens) > length and tokens[end + 1 - length : end + 1] == tokens[-length:]:
                text = list(tokens)
                for place in range(end + 1, end + 1 + count):
                    text.append(text[place])
                return tuple(text[len(tokens) :])
    return None


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    count=st.integers(1, 8),
)
def test_continuation_is_the_latest_of_the_longest_match(prompt, pieces, shortest, more, count) -> None:
    lookup = PromptLookup(shortest, shortest + more)
    sequence = Sequence(0, GREEDY, 0, prompt)
    tokens = list(prompt)
    for piece in [[], *pieces]:
        sequence.output_token_ids += piece
        tokens += piece
        assert lookup.continuation(sequence, count) == naive(tokens, shortest, shortest + more, count)


def test_sequences_are_apart_and_can_be_forgotten() -> None:
    lookup = PromptLookup(1, 2)
    first, second = Sequence(1, GREEDY, 0, [1, 2, 1]), Sequence(2, GREEDY, 0, [5, 6, 7])
    assert lookup.continuation(first, 2) == (2, 1)
    assert lookup.continuation(second, 2) is None
    lookup.release(first)
    lookup.release(first)
    assert lookup.continuation(Sequence(1, GREEDY, 0, [9, 9, 4]), 2) is None


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2)])
def test_lengths_in_wrong_order_are_refused(lengths) -> None:
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        PromptLookup(*lengths)


def lookup_runner(target, num_speculative_tokens: int) -> LookupRunner:
    config = target.config
    caches = caches_for(config.num_layers, config.num_kv_heads, config.head_dim)
    return LookupRunner(target, caches, Sampler("tiny", [EOS]), PromptLookup(1, 3), num_speculative_tokens, 96)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("num_speculative_tokens", [1, 4])
def test_no_token_changes(params: SamplingParams, num_speculative_tokens: int) -> None:
    torch.set_num_threads(1)
    target = random_target()
    plain = [Driver(plain_runner(target)).generate([s], 24)[0] for s in sequences_of(LENGTHS, [params] * len(LENGTHS))]
    runner = lookup_runner(target, num_speculative_tokens)
    driver = Driver(runner)
    assert driver.generate(sequences_of(LENGTHS, [params] * len(LENGTHS)), 24) == plain
    counted = [output for _, output in driver.outputs]
    assert {output.not_speculated for output in counted} <= {None, NOT_FOUND}
    assert {output.num_draft_tokens for output in counted} <= {0, num_speculative_tokens}
    if params is GREEDY:
        assert sum(output.num_accepted_tokens for output in counted) > 10


def test_a_request_may_switch_it_off() -> None:
    runner = lookup_runner(random_target(), 2)
    params = SamplingParams(temperature=0, max_tokens=None, speculation=False)
    (sequence,) = sequences_of((6,), [params])
    driver = Driver(runner)
    driver.generate([sequence], 3)
    assert driver.outputs[-1][1].not_speculated == SWITCHED_OFF
