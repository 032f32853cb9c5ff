"""One completion while it grows: its text, its stop conditions, what has been given of it."""

from collections.abc import Sequence as Seq

from sparkgap.config import FinishReason
from sparkgap.engine.detokenizer import Detokenizer, StopStrings, Tokenizer
from sparkgap.engine.outputs import CompletionOutput, Logprob
from sparkgap.rounds.sequence import SampledToken, Sequence, TokenLogprobs


class Completion:
    """Follows one sequence of a request.

    Attributes:
        index: which of the request's completions.
        sequence: the tokens.
        max_tokens: most output tokens, within the context.
        text: text so far; includes what may still become a stop string.
        finish_reason, stop_reason: as in `CompletionOutput`.
    """

    def __init__(
        self, index: int, sequence: Sequence, max_tokens: int, tokenizer: Tokenizer, eos_token_ids: Seq[int]
    ) -> None:
        params = sequence.params
        self.index = index
        self.sequence = sequence
        self.max_tokens = max_tokens
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, sequence.prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings)
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._ending_token_ids = self._eos_token_ids | frozenset(params.stop_token_ids or ())
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._num_given_tokens = 0
        self._num_given_characters = 0
        self._held_from = 0
        self._has_given_end = False

    @property
    def finished(self) -> bool:
        """Whether no token can follow."""
        return self.finish_reason is not None

    def append_tokens(self, tokens: Seq[SampledToken]) -> None:
        """Take new tokens in order, up to the first that ends the completion; those after it are dropped."""
        for token in tokens:
            if self.finished:
                return
            self._append(token)

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End the completion; text that was held is released."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._add_text(self._detokenizer.flush())

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def take_new(self) -> CompletionOutput | None:
        """What is new since the last call, None if nothing is; text that may become a stop string is held."""
        first_token, first_character = self._num_given_tokens, self._num_given_characters
        if self._has_given_end or not (self.finished or first_token < len(self.sequence.output_token_ids)):
            return None
        self._has_given_end = self.finished
        output = self._output(first_token, first_character)
        self._num_given_tokens += len(output.token_ids)
        self._num_given_characters += len(output.text)
        return output

    def _output(self, first_token: int, first_character: int) -> CompletionOutput:
        wanted = self.sequence.params.logprobs is not None
        self._held_from = len(self.text) if self.finished else self._stops.held_from(self.text, self._held_from)
        return CompletionOutput(
            index=self.index,
            text=self.text[first_character : self._held_from],
            token_ids=self.sequence.output_token_ids[first_token:],
            logprobs=self._logprobs[first_token:] if wanted else None,
            cumulative_logprob=self._cumulative_logprob if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _append(self, token: SampledToken) -> None:
        params = self.sequence.params
        self.sequence.output_token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._add_logprobs(token.token_id, token.logprobs)
        number = len(self.sequence.output_token_ids)
        ends = number >= params.min_tokens and token.token_id in self._ending_token_ids
        if not ends or params.include_stop_str_in_output:
            self._add_text(self._detokenizer.add(token.token_id))
        if self.finished:
            return
        if ends:
            # A token that is both is an end of sequence, which has no stop reason.
            self.finish("stop", None if token.token_id in self._eos_token_ids else token.token_id)
        elif number >= self.max_tokens:
            self.finish("length")

    def _add_text(self, piece: str) -> None:
        """Append text, and end the completion at the first stop string that it completes."""
        if not piece:
            return
        num_seen = len(self.text)
        self.text += piece
        if len(self.sequence.output_token_ids) <= self.sequence.params.min_tokens:
            return
        match = self._stops.find(self.text, num_seen)
        if match is not None:
            include = self.sequence.params.include_stop_str_in_output
            self.text = self.text[: match.end if include else match.start]
            self.finish_reason = "stop"
            self.stop_reason = match.stop

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Tables of the prompt's tokens, the first of which has none; None where they are not wanted or not complete.

        A sequence that failed, or was ended, in its prompt has none.
        """
        tokens, found = self.sequence.prompt_token_ids, self.sequence.prompt_logprobs
        if found is None or self.sequence.lacks_prompt_logprobs:
            return None
        return [None, *(self._table(token, row) for token, row in zip(tokens[1:], found, strict=True))]

    def _add_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._cumulative_logprob += logprobs.chosen
        self._logprobs.append(self._table(token_id, logprobs))

    def _table(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        table = {token_id: Logprob(logprobs.chosen, logprobs.rank, self._text_of(token_id))}
        for rank, (other, logprob) in enumerate(logprobs.top, start=1):
            if other != token_id:
                table[other] = Logprob(logprob, rank, self._text_of(other))
        return table

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
