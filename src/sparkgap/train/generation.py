"""Stage 1, the machine: many conversations decoded side by side, one row each, with what training needs captured.

The rows go through the target's serving pass (`Decoder.forward` on paged KV), so the hidden states that a drafter
learns from are those that it will be given.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch
from sparkgap.models.cache import allocate_caches
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight
from sparkgap.ops.torch_kernels import TorchKernels
from sparkgap.train.config import ConversationConfig
from sparkgap.train.openers import opener
from sparkgap.train.template import TurnTemplate

_SAMPLED_TOKENS = 256
"""Most probable tokens that are sampled from at temperatures above 0."""


_GROUP_LANES = 16
"""Lanes whose attention is computed together on a CPU."""


class LaneKernels(TorchKernels):
    """Torch kernels for many sequences of one row each, on the caches of `lane_caches`.

    A lane's KV is one block, so that its keys and values are read where they lie, and attention is two batched
    matrix products in the cache's dtype.
    """

    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """See `Kernels.kv_write`; slots must not be masked."""
        lanes, places = slots // cache.block_size, slots % cache.block_size
        cache.keys[lanes, places] = keys
        cache.values[lanes, places] = values

    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        if rows.max_rows != 1 or sliding_window is not None:
            return super().paged_attention(queries, cache, rows, scale, sliding_window, following)
        # Lanes of like length together, so that short ones are not padded to the longest.
        order = rows.positions.argsort()
        output = torch.empty_like(queries)
        for group in torch.split(order, _GROUP_LANES if queries.device.type == "cpu" else order.shape[0]):
            positions = rows.positions[group]
            length = int(positions[-1]) + 1 if queries.device.type == "cpu" else rows.max_length
            output[group] = _lane_attention(
                queries[group] * scale, cache, rows.block_tables[group, 0], positions, length
            )
        return output


def _lane_attention(queries: Tensor, cache: KVCache, lanes: Tensor, positions: Tensor, length: int) -> Tensor:
    """Attention of one row a lane over the first `length` places: `[lanes, heads, head_dim]`."""
    count, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[2]
    keys, values = (x.transpose(1, 2)[:, :, :length].index_select(0, lanes) for x in (cache.keys, cache.values))
    grouped = queries.reshape(count * kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(grouped, keys.view(count * kv_heads, length, head_dim).transpose(1, 2))
    unseen = torch.arange(length, device=queries.device) > positions[:, None]
    scores.view(count, heads, length).masked_fill_(unseen[:, None], -torch.inf)
    return torch.bmm(scores.softmax(-1), values.view(count * kv_heads, length, head_dim)).view(queries.shape)


def lane_caches(model: ModelConfig, lanes: int, capacity: int, target: Decoder) -> list[KVCache]:
    """One cache a layer with a block of `capacity` positions for each lane.

    `LaneKernels` want heads before positions in memory.
    """
    if not isinstance(target.kernels, LaneKernels):
        return allocate_caches(
            model.num_layers, model.num_kv_heads, model.head_dim, lanes, capacity, target.dtype, target.device
        )
    shape = (lanes, model.num_kv_heads, capacity, model.head_dim)

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=target.dtype, device=target.device).transpose(1, 2)

    return [KVCache(zeros(), zeros()) for _ in range(model.num_layers)]


@dataclass(frozen=True)
class Conversation:
    """One user turn with its answer, and what the target computed of it.

    Attributes:
        token_ids: all of it, template included.
        answer_start: first position of the answer.
        temperature: of the answer.
        taps: `[positions, m * hidden]`, captured hidden states of every position but the last token's.
        top_ids: int32 `[positions, k]`, most probable next tokens.
        top_logprobs: float16 `[positions, k]`, their log-probabilities.
    """

    token_ids: list[int]
    answer_start: int
    temperature: float
    taps: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass
class _Lane:
    """One conversation in the making."""

    token_ids: list[int]
    position: int
    user_temperature: float
    answer_temperature: float
    answer_start: int = 0
    taps: list[Tensor] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_logprobs: list[Tensor] = field(default_factory=list)


def user_room(template: TurnTemplate, config: ConversationConfig) -> int:
    """Tokens of a user turn that leave room for the shortest answer; none or fewer where nothing fits."""
    return config.max_positions - len(template.opening) - len(template.middle) - config.min_answer_tokens


class ConversationSampler:
    """Decodes conversations in lanes.

    Args:
        target: the model that writes both turns.
        template: how a conversation is laid out.
        config: how tokens are sampled.
        layer_ids: layers to capture.
        top_k: most probable tokens to keep at each position.
        encode: text to token ids, of the openers of user turns.
    """

    def __init__(
        self,
        target: Decoder,
        template: TurnTemplate,
        config: ConversationConfig,
        layer_ids: tuple[int, ...],
        top_k: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.target, self.template, self.config, self.encode = target, template, config, encode
        self.layer_ids, self.top_k = layer_ids, top_k
        model = target.config
        self.capacity = config.max_positions
        self.caches = lane_caches(model, config.lanes, self.capacity, target)
        self._prefix = self._prefill(0, template.opening)
        opening = len(template.opening)
        self._prefix_kv = [
            (cache.keys[0, :opening].clone(), cache.values[0, :opening].clone()) for cache in self.caches
        ]

    def shard(
        self,
        seed: str,
        user_turns: Iterator[list[int]] | None,
        on_answer: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Conversation] | None:
        """Sample `shard_conversations` conversations. The result depends on the seed and the arguments alone.

        Answers still open when fewer than a quarter of the lanes are busy are kept as far as they came.

        Args:
            seed: of temperatures and tokens.
            user_turns: token ids of user turns; None lets the target write them.
            on_answer: told the number of answer tokens of each finished conversation.
            stopped: when it says so, sampling ends with None.
        """
        draw = random.Random(seed)
        generator = torch.Generator(self.target.device).manual_seed(draw.getrandbits(63))
        finished: list[Conversation] = []
        seen: set[tuple[int, ...]] = set()
        lanes: list[_Lane | None] = [self._open(i, draw, user_turns) for i in range(self.config.lanes)]
        started = sum(lane is not None for lane in lanes)
        attempts = 50 * self.config.shard_conversations
        while any(lanes):
            if stopped():
                return None
            busy = [index for index, lane in enumerate(lanes) if lane is not None]
            if started >= self.config.shard_conversations and 4 * len(busy) < self.config.lanes:
                finished += [c for lane in lanes if lane is not None if (c := self._close(lane)) is not None]
                break
            tokens = self._step([lanes[index] for index in busy], busy, generator)  # type: ignore[misc]
            for index, token in zip(busy, tokens, strict=True):
                lane = lanes[index]
                assert lane is not None
                state = self._advance(lane, token, seen)
                if state == "open":
                    continue
                conversation = self._close(lane) if state == "ended" else None
                if conversation is not None:
                    finished.append(conversation)
                    on_answer(len(conversation.token_ids) - conversation.answer_start)
                else:
                    started, attempts = started - 1, attempts - 1
                lanes[index] = None
                if started < self.config.shard_conversations and attempts > 0:
                    lanes[index] = self._open(index, draw, user_turns)
                    started += lanes[index] is not None
        return finished

    def _open(self, index: int, draw: random.Random, user_turns: Iterator[list[int]] | None) -> _Lane | None:
        """A new conversation in a lane; None when there are no more user turns."""
        user_temperature = draw.choice(self.config.user_temperatures)
        answer_temperature = draw.choice(self.config.answer_temperatures)
        opening, taps = self.template.opening, [self._prefix[0]]
        top_ids, top_logprobs = [self._prefix[1]], [self._prefix[2]]
        lane = _Lane([*opening], len(opening) - 1, user_temperature, answer_temperature, 0, taps, top_ids, top_logprobs)
        for cache, (keys, values) in zip(self.caches, self._prefix_kv, strict=True):
            cache.keys[index, : len(opening)], cache.values[index, : len(opening)] = keys, values
        if user_turns is None:
            if draw.random() < self.config.opener_share:
                longest = min(self.config.max_user_tokens, user_room(self.template, self.config)) // 2
                lane.token_ids += self.encode(opener(draw))[:longest]
            return lane
        turn = next(user_turns, None)
        if turn is None:
            return None
        lane.token_ids += [*turn, *self.template.middle]
        lane.answer_start = len(lane.token_ids)
        prefilled = self._prefill(index, lane.token_ids[:-1])
        lane.taps, lane.top_ids, lane.top_logprobs = [prefilled[0]], [prefilled[1]], [prefilled[2]]
        lane.position = len(lane.token_ids) - 1
        return lane

    def _prefill(self, index: int, token_ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over tokens at the start of a lane: taps, top ids and log-probabilities of each.

        The last row of an opening is left out: the first decoding step computes it again.
        """
        device, count = self.target.device, len(token_ids)
        positions = torch.arange(count, device=device)
        rows = AttentionRows(
            positions,
            torch.tensor([0, count], dtype=torch.int32, device=device),
            torch.tensor([[index]], dtype=torch.int32, device=device),
            max(count, 2),
            count,
        )
        slots = index * self.capacity + positions
        result = self.target.forward(
            ForwardBatch(torch.tensor(token_ids, device=device), slots, rows), self.caches, self.layer_ids
        )
        assert result.captured is not None
        top_ids, top_logprobs = self._top(self.target.logits(result.hidden))
        kept = count - 1 if token_ids == self.template.opening else count
        return result.captured[:kept].to(self.target.dtype), top_ids[:kept], top_logprobs[:kept]

    def _top(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = logits.topk(self.top_k, dim=-1)
        return ids.to(torch.int32), (values - logits.logsumexp(-1, keepdim=True)).to(torch.float16)

    def _step(self, lanes: list[_Lane], indices: list[int], generator: torch.Generator) -> list[int]:
        """Compute each lane's current position; the token that each would take next."""
        device, count = self.target.device, len(lanes)
        positions = torch.tensor([lane.position for lane in lanes], device=device)
        blocks = torch.tensor(indices, device=device)
        rows = AttentionRows(
            positions,
            torch.arange(count + 1, dtype=torch.int32, device=device),
            blocks.to(torch.int32)[:, None],
            1,
            max(lane.position for lane in lanes) + 1,
        )
        token_ids = torch.tensor([lane.token_ids[lane.position] for lane in lanes], device=device)
        result = self.target.forward(
            ForwardBatch(token_ids, blocks * self.capacity + positions, rows), self.caches, self.layer_ids
        )
        assert result.captured is not None
        captured = result.captured.to(self.target.dtype)
        logits = self.target.logits(result.hidden)
        top_ids, top_logprobs = self._top(logits)
        for row, lane in enumerate(lanes):
            lane.taps.append(captured[row : row + 1])
            lane.top_ids.append(top_ids[row : row + 1])
            lane.top_logprobs.append(top_logprobs[row : row + 1])
        temperatures = [lane.answer_temperature if lane.answer_start else lane.user_temperature for lane in lanes]
        return self._pick(logits, top_ids[:, 0], torch.tensor(temperatures, device=device), generator)

    def _pick(self, logits: Tensor, greedy: Tensor, temperatures: Tensor, generator: torch.Generator) -> list[int]:
        tokens = greedy.to(torch.int64)
        sampled = temperatures.nonzero()[:, 0]
        if sampled.numel():
            count = min(_SAMPLED_TOKENS, logits.shape[1])
            values, ids = logits[sampled].topk(count, dim=-1)
            probabilities = (values / temperatures[sampled, None]).softmax(-1)
            outside = probabilities.cumsum(-1) - probabilities >= self.config.top_p
            choice = torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)
            tokens[sampled] = ids.gather(1, choice)[:, 0]
        return [int(token) for token in tokens.tolist()]

    def _advance(self, lane: _Lane, token: int, seen: set[tuple[int, ...]]) -> str:
        """Move a lane on: `open`, `ended`, or `dropped`."""
        lane.position += 1
        if lane.position < len(lane.token_ids):
            return "open"
        template, config = self.template, self.config
        if lane.answer_start:
            lane.token_ids.append(token)
            ended = token in template.end_tokens or len(lane.token_ids) >= self.capacity
            return "ended" if ended else "open"
        turn = tuple(lane.token_ids[len(template.opening) :])
        if token not in template.turn_ends:
            lane.token_ids.append(token)
            room = self.capacity - len(template.middle) - config.min_answer_tokens
            too_long = len(turn) >= config.max_user_tokens or len(lane.token_ids) >= room
            return "dropped" if too_long else "open"
        if not turn or turn in seen:
            return "dropped"
        seen.add(turn)
        lane.token_ids += template.middle
        lane.answer_start = len(lane.token_ids)
        return "open"

    def _close(self, lane: _Lane) -> Conversation | None:
        """The conversation of a lane; None when its answer is too short to learn from."""
        if not lane.answer_start or len(lane.token_ids) - lane.answer_start < self.config.min_answer_tokens:
            return None
        computed = lane.position
        return Conversation(
            lane.token_ids[: computed + 1],
            lane.answer_start,
            lane.answer_temperature,
            torch.cat(lane.taps)[:computed],
            torch.cat(lane.top_ids)[:computed],
            torch.cat(lane.top_logprobs)[:computed],
        )
