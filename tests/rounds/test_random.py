"""Philox against its published vectors, its two implementations against each other, and its distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sparkgap.rounds.random import Purpose, derive_seed, philox, philox_words, uniform, uniform_number

# Random123's known-answer tests for philox4x32-10.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

words_32 = st.integers(0, 2**32 - 1)
seeds_64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    assert philox_words(counter, key) == expected
    assert tuple(philox(torch.tensor(counter), torch.tensor(key)).tolist()) == expected


@given(st.lists(st.tuples(*[words_32] * 6), min_size=1, max_size=8))
def test_tensor_and_host_blocks_agree(rows):
    block = torch.tensor(rows)
    assert philox(block[:, :4], block[:, 4:]).tolist() == [list(philox_words(r[:4], r[4:])) for r in rows]


@given(st.lists(st.tuples(seeds_64, st.integers(0, 2**40)), min_size=1, max_size=8), st.sampled_from(Purpose))
def test_tensor_and_host_uniforms_agree(rows, purpose):
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    expected = [uniform_number(seed, position, purpose) for seed, position in rows]
    got = uniform(seeds, positions, purpose)
    assert got.dtype == torch.float64
    assert got.tolist() == expected
    single = uniform(seeds, positions, purpose, torch.float32)
    assert single.dtype == torch.float32
    assert [int(value * 2**24) for value in single.tolist()] == [int(value * 2**24) for value in expected]


def test_signed_and_unsigned_seeds_are_one_key():
    assert uniform_number(-1, 5, Purpose.TARGET) == uniform_number(2**64 - 1, 5, Purpose.TARGET)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_over_positions_and_over_seeds(dtype):
    count = torch.arange(20_000)
    for seeds, positions in ((torch.full_like(count, 7), count), (count, torch.full_like(count, 7))):
        numbers = uniform(seeds, positions, Purpose.TARGET, dtype)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 0.001


def test_purposes_are_independent():
    count = torch.arange(20_000)
    columns = [uniform(torch.zeros_like(count), count, purpose) for purpose in Purpose]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns), dtype=torch.float64)
    assert correlation.abs().max() < 0.03


def test_derived_seeds_are_distinct_64_bit_numbers():
    derived = {derive_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(derived) == 10_000
    assert all(0 <= seed < 2**64 for seed in derived)
    assert max(derived) > 2**63
