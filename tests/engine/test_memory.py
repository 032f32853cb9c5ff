"""The size of the KV cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.config import EngineConfig
from sparkgap.engine.memory import check_model_fits, kv_cache_blocks
from sparkgap.errors import ConfigError

GIB = 1 << 30


def blocks(*, given_bytes=None, seqs=16, length=1000, block_bytes=1 << 20, available=64 * GIB, on_cpu=True):
    config = EngineConfig(kv_cache_memory_bytes=given_bytes, max_num_seqs=seqs)
    return kv_cache_blocks(
        config, block_bytes=block_bytes, max_model_len=length, available_bytes=available, on_cpu=on_cpu
    )


def test_default_sizes():
    assert blocks(length=160, block_bytes=1 << 10) == 16 * 10
    assert blocks() == 16 * 63
    assert blocks(seqs=17) == 1024
    assert blocks(seqs=17, on_cpu=False) == 17 * 63
    assert blocks(length=1024, seqs=100) == 1024
    assert blocks(length=1024, seqs=1000, on_cpu=False) == 16 * 1024
    assert blocks(length=16 * 2000, on_cpu=True) == 2000
    assert blocks(available=2 * GIB, length=16 * 600) == 600
    assert blocks(available=2 * GIB, length=16 * 400) == 512


def test_given_sizes():
    assert blocks(given_bytes=100 << 20, length=16 * 100) == 100
    assert blocks(given_bytes=(101 << 20) - 1, length=1, seqs=1) == 100
    with pytest.raises(ConfigError, match=r"holds 1584 positions.*max_model_len 1600 needs 104857600 bytes"):
        blocks(given_bytes=(100 << 20) - 1, length=1600)


def test_one_sequence_must_fit():
    with pytest.raises(ConfigError, match=r"max_model_len 32768 takes 2048 MiB, and 1024 MiB"):
        blocks(length=32768, available=GIB)


def test_more_is_given_than_there_is():
    with pytest.raises(ConfigError, match=r"is 2048 MiB, and 1024 MiB of memory are available; lower it"):
        blocks(given_bytes=2 * GIB, length=16, available=GIB)


def test_a_model_must_fit():
    def check(weights_bytes, max_model_len):
        check_model_fits(
            "m", weights_bytes=weights_bytes, position_bytes=1 << 20, max_model_len=max_model_len, available_bytes=GIB
        )

    check(GIB // 2, 512)
    with pytest.raises(ConfigError, match=r"weights of model m take 2048 MiB, and 1024 MiB"):
        check(2 * GIB, 1)
    with pytest.raises(ConfigError, match=r"one sequence of max_model_len 513 513 MiB.*lower max_model_len"):
        check(GIB // 2, 513)


@given(st.integers(1, 10**5), st.integers(1, 10**6), st.integers(1, 64), st.integers(0, 10**12), st.booleans())
def test_never_below_one_sequence_and_never_above_what_is_needed(length, block_bytes, seqs, available, on_cpu):
    one = -(-length // 16)
    try:
        number = blocks(length=length, block_bytes=block_bytes, seqs=seqs, available=available, on_cpu=on_cpu)
    except ConfigError:
        assert one * block_bytes > available
        return
    assert one <= number <= one * seqs
    assert number == one or number * block_bytes <= min(available / 4, GIB if on_cpu else available)
