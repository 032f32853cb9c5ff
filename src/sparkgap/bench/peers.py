"""Other engines on the same model file, as columns of the latency bench. They run on the CPU.

Each is used the way its own documentation tells Python users to, with its defaults except for what makes the work
the same: the prompt's token ids, greedy choice, a number of output tokens, a number of threads.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from math import prod
from typing import Any

import torch

from sparkgap.bench.latency import Column, Generation
from sparkgap.bench.machine import torch_threads
from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.device.host import available_memory_bytes
from sparkgap.errors import ConfigError

_PACKAGES = {"transformers": ("transformers", "accelerate"), "llama.cpp": ("llama_cpp",)}
PEERS = tuple(_PACKAGES)
"""Names of the engines."""


def check_peers(names: Sequence[str]) -> None:
    """Raises ConfigError when a name is no engine's, or its package is not installed."""
    for name in names:
        if name not in _PACKAGES:
            raise ConfigError(f"peer must be one of {', '.join(PEERS)}, got {name!r}")
        for package in _PACKAGES[name]:
            if find_spec(package) is None:
                raise ConfigError(f"peer {name} needs package {package}: pip install 'sparkgap[bench]'")


def load_peer(name: str, checkpoint: Checkpoint, *, threads: int, max_tokens: int) -> Column:
    """Load a model into another engine.

    Args:
        name: one of `PEERS`, installed.
        checkpoint: the model.
        threads: compute threads.
        max_tokens: most tokens of a prompt and its answer.

    Raises:
        ConfigError: the engine does not read this kind of file, or the memory available is too small.
    """
    if name == "llama.cpp" and checkpoint.format != "gguf":
        raise ConfigError(f"peer llama.cpp reads .gguf files, and model {checkpoint.name} is {checkpoint.path}")
    needed, available = _needed_bytes(name, checkpoint), available_memory_bytes(torch.device("cpu"))
    if needed > available:
        raise ConfigError(
            f"peer {name} needs about {needed >> 20} MiB beside the model, and {available >> 20} MiB of memory are "
            "available; leave it out or measure it alone"
        )
    if name == "llama.cpp":
        return LlamaCppPeer(checkpoint, threads, max_tokens)
    return TransformersPeer(checkpoint, threads)


def _needed_bytes(name: str, checkpoint: Checkpoint) -> int:
    if name == "llama.cpp":
        return checkpoint.size_bytes
    weights = checkpoint.weights
    parameters = sum(prod(weights.shape(tensor)) for tensor in weights.names())
    # bfloat16; transformers expands a GGUF file to float32 first.
    return parameters * (6 if checkpoint.format == "gguf" else 2)


class TransformersPeer:
    """Hugging Face transformers: `generate` of the model in bfloat16."""

    name = "transformers"

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        transformers: Any = import_module("transformers")
        self._threads = threads
        path, gguf_file = checkpoint.path, {}
        if checkpoint.format == "gguf":
            path, gguf_file = path.parent, {"gguf_file": path.name}
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        # Reading a GGUF file draws a bar of its own.
        with torch_threads(threads), redirect_stderr(StringIO()):
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.bfloat16, local_files_only=True, **gguf_file
            )
        self._model.eval()
        # The model's own names end-of-sequence tokens and sampling settings.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Version and dtype."""
        return {"version": version("transformers"), "dtype": str(self._model.dtype).removeprefix("torch.")}

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """See `Column.generate`."""
        prompt = torch.tensor([list(token_ids)])
        arrivals = _Arrivals()
        with torch_threads(self._threads), torch.inference_mode():
            start_s = time.perf_counter()
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, streamer=arrivals
            )
        # The first arrival is the prompt.
        return timed_generation(output[0, prompt.shape[1] :].tolist(), arrivals.times_s[1:], start_s)


class _Arrivals:
    """A transformers streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens have come: the prompt's first, then one at a time."""
        del value
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


class LlamaCppPeer:
    """llama.cpp by way of llama-cpp-python's `Llama.generate`; the weights stay as the file has them."""

    name = "llama.cpp"

    def __init__(self, checkpoint: Checkpoint, threads: int, max_tokens: int) -> None:
        llama_cpp: Any = import_module("llama_cpp")
        self._model: Any = llama_cpp.Llama(
            str(checkpoint.path),
            n_ctx=max_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            verbose=False,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Version and the file's type of weights."""
        return {
            "version": version("llama_cpp_python"),
            "weights": _file_type(self._model.metadata.get("general.file_type")),
        }

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """See `Column.generate`."""
        # Without this a prompt that begins like the one before is not computed again.
        self._model.reset()
        start_s = time.perf_counter()
        tokens, times_s = _timed_tokens(
            self._model.generate(list(token_ids), temp=0.0, repeat_penalty=1.0), num_tokens, time.perf_counter
        )
        return timed_generation(tokens, times_s, start_s)


def _timed_tokens(stream: Any, number: int, clock: Callable[[], float]) -> tuple[list[int], list[float]]:
    """The first `number` tokens of an endless stream, and when they came; the stream is closed."""
    tokens: list[int] = []
    times_s: list[float] = []
    try:
        while len(tokens) < number:
            tokens.append(int(next(stream)))
            times_s.append(clock())
    finally:
        stream.close()
    return tokens, times_s


def timed_generation(token_ids: list[int], times_s: Sequence[float], start_s: float) -> Generation:
    """An answer from the times at which its tokens came."""
    if len(times_s) != len(token_ids):
        raise RuntimeError(f"{len(token_ids)} tokens came at {len(times_s)} times")
    return Generation(token_ids, (times_s[0] - start_s) * 1e3, (times_s[-1] - start_s) * 1e3)


def _file_type(number: str | None) -> str | None:
    """What the `general.file_type` of a GGUF file means, such as `Q4_1`; None when it does not say."""
    from gguf import LlamaFileType

    try:
        return None if number is None else LlamaFileType(int(number)).name.removeprefix("MOSTLY_")
    except ValueError:
        return number
