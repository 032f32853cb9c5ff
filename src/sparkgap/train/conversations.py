"""Stage 1: conversations sampled from the target, shard by shard, until there are enough answer tokens."""

import json
import math
import shutil
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.train.config import ConversationConfig
from sparkgap.train.features import Examples, shard_bytes, write_shard
from sparkgap.train.generation import ConversationSampler, user_room
from sparkgap.train.progress import Bar, Progress
from sparkgap.train.template import TurnTemplate

_FRUITLESS_SHARDS = 3
"""Files in a row without a new conversation after which sampling is given up."""

_FEWEST_USER_TOKENS = 4
"""Tokens that a user turn needs room for."""


def prompt_lines(path: Path) -> list[str]:
    """The lines of a file of user turns.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        # splitlines() would also break at characters that JSON strings and sentences may hold.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}") from error


def read_prompts(path: Path) -> list[str]:
    """User turns of a file: JSON objects with `prompt` (or `text`) if its name ends in `.jsonl`, else one a line.

    Raises:
        ConfigError: the file cannot be read, has a line of another form, or no prompts.
    """
    prompts = []
    for number, line in enumerate(prompt_lines(path), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line.strip())
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
        text = item.get("prompt", item.get("text")) if isinstance(item, dict) else item
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{path}, line {number}: no text under `prompt`")
        prompts.append(text)
    if not prompts:
        raise ConfigError(f"prompts file {path} has no prompts")
    return prompts


def check_room(template: TurnTemplate, config: ConversationConfig) -> None:
    """Refuse conversations that are too short for the template, a user turn and an answer.

    Raises:
        ConfigError: naming the fewest positions that do.
    """
    room = user_room(template, config)
    if room < _FEWEST_USER_TOKENS:
        raise ConfigError(
            f"max_positions {config.max_positions} is too short: the chat template takes "
            f"{len(template.opening) + len(template.middle)} tokens, and an answer has at least "
            f"{config.min_answer_tokens}; give at least {config.max_positions - room + _FEWEST_USER_TOKENS} positions"
        )


def check_disk(
    directory: Path, target: Decoder, config: ConversationConfig, layer_ids: tuple[int, ...], top_k: int
) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        ConfigError: naming the space needed and the space there is.
    """
    width = len(layer_ids) * target.config.hidden_size
    # Prompts and templates add about half of the answers' positions.
    needed = shard_bytes(round(config.answer_tokens * 1.6), width, top_k, target.dtype)
    held = sum(path.stat().st_size for path in directory.glob("shard-*.safetensors"))
    free = shutil.disk_usage(directory).free
    if needed - held > free:
        raise ConfigError(
            f"{directory} has {free / 2**30:.1f} GiB free, and features of {config.answer_tokens} answer tokens "
            f"take about {needed / 2**30:.1f} GiB; free some space or lower --answer-tokens"
        )


class SampledTokens:
    """Counts answer tokens while shards are sampled, and foresees how many there will be.

    Shards are whole: the last one brings more than was asked for, up to all that its conversations hold. Safe to use
    from several threads.

    Args:
        wanted: answer tokens asked for.
        shard_conversations: conversations of a shard.
        max_shards: most shards there can be; None for no limit.
        bar: where the counts are shown.
    """

    def __init__(self, wanted: int, shard_conversations: int, max_shards: int | None, bar: Bar) -> None:
        self.wanted, self.shard_conversations, self.max_shards, self._bar = wanted, shard_conversations, max_shards, bar
        self._lock = threading.Lock()
        self._finished = self._finished_shards = 0
        self._open: dict[int, list[int]] = {}

    def add(self, shard: int, tokens: int) -> None:
        """A conversation of a shard that is being sampled has an answer of so many tokens."""
        with self._lock:
            if self._finished < self.wanted:
                self._open.setdefault(shard, []).append(tokens)
                self._show()

    def finish(self, shard: int, tokens: int, *, sampled_before: bool) -> None:
        """A shard is there, and all shards up to it have so many different answer tokens.

        Args:
            shard: its number.
            tokens: answer tokens of this shard and those before it, conversations that repeat others left out.
            sampled_before: an earlier run made it, so that it does not count in the speed.
        """
        with self._lock:
            self._open.pop(shard, None)
            self._finished, self._finished_shards = tokens, self._finished_shards + 1
            if tokens >= self.wanted:
                self._open.clear()  # shards begun ahead are given up
            if sampled_before:
                self._bar.start_from(self._finished)
            self._show()

    def expected(self) -> int:
        """Answer tokens that there will be in the end, as far as can be told."""
        done = self._finished + self._open_tokens()
        if self._finished >= self.wanted or self._finished_shards == self.max_shards:
            return done
        answers = self._finished_shards * self.shard_conversations + sum(map(len, self._open.values()))
        if not answers:
            return self.wanted
        per_shard = done / answers * self.shard_conversations
        shards = math.ceil((self.wanted - self._finished) / per_shard)
        if self.max_shards is not None:
            shards = min(shards, self.max_shards - self._finished_shards)
        return max(done, self._finished + round(shards * per_shard))

    def _open_tokens(self) -> int:
        return sum(map(sum, self._open.values()))

    def _show(self) -> None:
        self._bar.expect(self.expected())
        self._bar.set(self._finished + self._open_tokens())


def collect(
    directory: Path,
    target: Decoder,
    workers: int,
    template: TurnTemplate,
    tokenizer: Tokenizer,
    config: ConversationConfig,
    layer_ids: tuple[int, ...],
    top_k: int,
    seed: int,
    progress: Progress,
    examples: Examples | None = None,
) -> list[Path]:
    """Sample until `answer_tokens` answer tokens are there; shards that exist are kept.

    Each shard depends on the seed and its number alone, so stopping and starting again changes nothing.

    Args:
        directory: of the shards.
        target: writes both turns.
        workers: shards sampled at a time, each in its own thread.
        template: layout of a conversation.
        tokenizer: of prompts in a file and of openers.
        config: how to sample.
        layer_ids: layers whose states are kept.
        top_k: most probable tokens that are kept.
        seed: of everything drawn.
        progress: told of answer tokens.
        examples: what the shards are read into, as they come.

    Returns:
        Paths of the shards used, in order.

    Raises:
        ConfigError: the disk cannot hold them, a file is damaged, or the target writes nothing that is new.
    """
    directory.mkdir(parents=True, exist_ok=True)
    check_disk(directory, target, config, layer_ids, top_k)
    turns = file_turns(tokenizer, template, config)
    size = config.shard_conversations
    threads = max(torch.get_num_threads() // workers, 1)
    fruitless = 0
    last = -(-len(turns) // size) if config.only_prompts else None
    stop = threading.Event()
    paths: list[Path] = []
    examples = Examples() if examples is None else examples

    def work(number: int, sampler: ConversationSampler, counts: SampledTokens) -> None:
        path = shard_path(directory, number)
        if path.exists():
            return
        torch.set_num_threads(threads)
        given = turns[number * size : (number + 1) * size]
        with torch.inference_mode():
            conversations = sampler.shard(
                f"{seed}/{number}", iter(given) if given else None, partial(counts.add, number), stop.is_set
            )
        if conversations is not None:
            write_shard(path, conversations)

    with progress.task("conversations", config.answer_tokens, "answer tokens") as bar:
        samplers = [
            ConversationSampler(target, template, config, layer_ids, top_k, plain_encoding(tokenizer))
            for _ in range(workers)
        ]
        counts = SampledTokens(config.answer_tokens, size, last, bar)
        existing = set(directory.glob("shard-*.safetensors"))
        pool = ThreadPoolExecutor(workers, "sampler")
        try:
            futures: deque[Future[None]] = deque()
            number = 0
            while last is None or number < last:
                while len(futures) < workers and (last is None or number + len(futures) < last):
                    ahead = number + len(futures)
                    futures.append(pool.submit(work, ahead, samplers[ahead % workers], counts))
                futures.popleft().result()
                paths.append(shard_path(directory, number))
                known = len(examples.items)
                examples.add(paths[-1])
                fruitless = fruitless + 1 if len(examples.items) == known else 0
                if last is None and fruitless == _FRUITLESS_SHARDS:
                    raise ConfigError(
                        f"the target wrote no new conversation in {fruitless} files of {size}, after "
                        f"{len(examples.items)}: its user turns repeat themselves, are longer than "
                        f"{config.max_user_tokens} tokens, or its answers are shorter than {config.min_answer_tokens}; "
                        "give user turns with --prompts and --only-prompts, or raise --max-positions"
                    )
                tokens = examples.answer_tokens
                counts.finish(number, tokens, sampled_before=paths[-1] in existing)
                number += 1
                if tokens >= config.answer_tokens:
                    break
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return paths


def shard_path(directory: Path, number: int) -> Path:
    """File of a shard."""
    return directory / f"shard-{number:04d}.safetensors"


def plain_encoding(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text to token ids without special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def file_turns(tokenizer: Tokenizer, template: TurnTemplate, config: ConversationConfig) -> list[list[int]]:
    """Token ids of the different user turns in the prompts file that leave half of the positions for an answer."""
    if config.prompts is None:
        return []
    longest = min(config.max_positions // 2, user_room(template, config))
    turns = (tokenizer.encode(text, add_special_tokens=False) for text in dict.fromkeys(read_prompts(config.prompts)))
    return [turn for turn in turns if 0 < len(turn) <= longest]
