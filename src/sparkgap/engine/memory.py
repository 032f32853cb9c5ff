"""How large the KV cache is."""

from sparkgap.config import EngineConfig
from sparkgap.errors import ConfigError

_SHARE_OF_AVAILABLE = 0.25
_LARGEST_DEFAULT_CPU_BYTES = 1 << 30
_MEBIBYTE = 1 << 20


def kv_cache_blocks(
    config: EngineConfig, *, block_bytes: int, max_model_len: int, available_bytes: int, on_cpu: bool
) -> int:
    """Blocks of the KV cache.

    With `kv_cache_memory_bytes` as many as fit; otherwise enough for `max_num_seqs` sequences of `max_model_len`,
    within a quarter of the memory available and on the CPU within 1 GiB, but always enough for one sequence.

    Raises:
        ConfigError: one sequence of `max_model_len` does not fit, or more is asked for than there is.
    """
    one_sequence = -(-max_model_len // config.block_size)
    needed_bytes = one_sequence * block_bytes
    given_bytes = config.kv_cache_memory_bytes
    if given_bytes is not None:
        if given_bytes < needed_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes {given_bytes} holds {given_bytes // block_bytes * config.block_size} "
                f"positions, and one sequence of max_model_len {max_model_len} needs {needed_bytes} bytes; "
                "raise it or lower max_model_len"
            )
        if given_bytes > available_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes {given_bytes} is {_mebibytes(given_bytes)}, and {_mebibytes(available_bytes)} "
                "of memory are available; lower it"
            )
        return given_bytes // block_bytes
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"the KV cache of one sequence of max_model_len {max_model_len} takes "
            f"{_mebibytes(needed_bytes)}, and {_mebibytes(available_bytes)} of memory are available; "
            "lower max_model_len"
        )
    limit = int(available_bytes * _SHARE_OF_AVAILABLE)
    if on_cpu:
        limit = min(limit, _LARGEST_DEFAULT_CPU_BYTES)
    return max(min(config.max_num_seqs * one_sequence, limit // block_bytes), one_sequence)


def check_model_fits(
    name: str, *, weights_bytes: int, position_bytes: int, max_model_len: int, available_bytes: int
) -> None:
    """Check, before anything is allocated, that a model has room.

    Args:
        name: the model, for the message.
        weights_bytes: of all its weights.
        position_bytes: what one position of the longest sequence takes, its KV and its rotary angles.
        max_model_len: positions of the longest sequence.
        available_bytes: free memory.

    Raises:
        ConfigError: it has not; the message tells which part is too large.
    """
    if weights_bytes > available_bytes:
        raise ConfigError(
            f"the weights of model {name} take {_mebibytes(weights_bytes)}, and {_mebibytes(available_bytes)} of "
            "memory are available; use a smaller model or dtype"
        )
    if weights_bytes + position_bytes * max_model_len > available_bytes:
        raise ConfigError(
            f"model {name} takes {_mebibytes(weights_bytes)} and one sequence of max_model_len {max_model_len} "
            f"{_mebibytes(position_bytes * max_model_len)}, and {_mebibytes(available_bytes)} of memory are available; "
            "lower max_model_len"
        )


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes // _MEBIBYTE} MiB"
