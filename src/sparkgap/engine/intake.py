"""What a request must be before it may wait: its prompt, its parameters, and room for both."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sparkgap.config import SamplingParams
from sparkgap.engine.completion import Completion
from sparkgap.engine.detokenizer import Tokenizer
from sparkgap.engine.request import OutputKind, Request
from sparkgap.engine.scheduler import Scheduler
from sparkgap.errors import ConfigError, PromptError
from sparkgap.rounds.random import MASK_64, derive_seed
from sparkgap.rounds.sequence import Sequence


@dataclass(frozen=True)
class ModelLimits:
    """What the engine must know of the model it serves.

    Attributes:
        name: named in errors.
        vocab_size: ids below it are tokens.
        eos_token_ids: tokens that end a sequence.
        max_model_len: most positions of a sequence.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


class Intake:
    """Makes requests of what is asked for, and refuses what can never be computed.

    Args:
        tokenizer: text to tokens and back.
        model: the model's limits.
        scheduler: knows how many blocks a sequence needs, and how many there are.
        seed: requests without a seed of their own get theirs from it, in the order they are made.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelLimits, scheduler: Scheduler, seed: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._scheduler = scheduler
        self._seed = seed
        self._num_requests = 0
        self._num_sequences = 0

    def make_request(
        self, prompt: str | Seq[int], params: SamplingParams, *, request_id: str | None, output_kind: OutputKind
    ) -> Request:
        """See `Engine.make_request`."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params.check_vocabulary(self._model.vocab_size)
        # The length first: looking at each token of a prompt that is far too long takes long itself.
        max_tokens = self._max_tokens(len(token_ids), params)
        self._check_prompt(token_ids)
        number = self._num_requests
        self._num_requests += 1
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed & MASK_64
        return Request(
            request_id=f"request-{number}" if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            completions=[
                self._make_completion(i, token_ids, params, seed if i == 0 else derive_seed(seed, i), max_tokens)
                for i in range(params.n)
            ],
            output_kind=output_kind,
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise PromptError("the prompt is empty: it has no tokens")
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise PromptError(f"the prompt has {token_id!r} where a token id must be")
            if not 0 <= token_id < self._model.vocab_size:
                raise PromptError(
                    f"the prompt has token id {token_id}, outside {self._model.name}'s vocabulary of "
                    f"{self._model.vocab_size} tokens"
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most output tokens, within the context."""
        context = self._model.max_model_len
        if num_prompt_tokens >= context:
            raise PromptError(
                f"the prompt has {num_prompt_tokens} tokens and max_model_len is {context}, which must leave room "
                "for output; shorten the prompt, or raise max_model_len where the model has more positions"
            )
        room = context - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens is {params.min_tokens}, and after a prompt of {num_prompt_tokens} tokens "
                f"max_model_len {context} leaves room for {room}"
            )
        blocks = self._scheduler.blocks
        needed = self._scheduler.most_blocks(num_prompt_tokens + max_tokens)
        if needed > blocks.num_blocks:
            raise PromptError(
                f"a prompt of {num_prompt_tokens} tokens with {max_tokens} output tokens needs {needed} KV blocks "
                f"of {blocks.block_size} positions, and the cache has {blocks.num_blocks}; lower max_tokens or "
                "raise kv_cache_memory_bytes"
            )
        return max_tokens

    def _make_completion(
        self, index: int, prompt_token_ids: list[int], params: SamplingParams, seed: int, max_tokens: int
    ) -> Completion:
        sequence = Sequence(self._num_sequences, params, seed, prompt_token_ids, max_output_tokens=max_tokens)
        # One completion's are those of all.
        if params.prompt_logprobs is not None and index == 0:
            sequence.prompt_logprobs = []
        self._num_sequences += 1
        return Completion(index, sequence, max_tokens, self._tokenizer, self._model.eos_token_ids)
