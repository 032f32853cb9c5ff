"""How many prompt tokens a step computes, so that running requests keep their pace while a prompt is read."""

from collections import deque
from statistics import median

_FIRST_TOKENS = 32
"""Prompt tokens of the first step beside decodes, before anything was measured."""

_FEWEST_TOKENS = 4
"""A pass over fewer prompt tokens is hardly shorter: it reads all weights too."""

_GROWTH = 1.5
"""Most that the number of tokens changes by from one step to the next: one slow pass must not mean much."""

_RECENT_ROUNDS = 9
"""Decode rounds whose median is the pace."""


class PrefillPacer:
    """Chooses the number of prompt tokens of a step.

    A step that also decodes computes as many prompt tokens as let it take `stretch` times as long as its decode round
    alone. That is how much later a running request's tokens come while prompts are read, whatever the model, the
    machine, the number of requests and the length of the prompts. The number decides when tokens come, never which.

    Attributes:
        max_tokens: most prompt tokens of any step.
        stretch: see above; above 1.
        fixed_tokens: most prompt tokens of a step that also decodes; None measures.
    """

    def __init__(self, max_tokens: int, stretch: float, fixed_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.stretch = stretch
        self.fixed_tokens = fixed_tokens
        self._beside_decodes = min(_FIRST_TOKENS, max_tokens)
        self._decodes_s: deque[float] = deque(maxlen=_RECENT_ROUNDS)

    def num_tokens(self, *, beside_decodes: bool) -> int:
        """Most prompt tokens of the next step."""
        if not beside_decodes:
            return self.max_tokens
        return min(self.max_tokens, self.fixed_tokens or self._beside_decodes)

    def add_decode(self, duration_s: float) -> None:
        """A decode round took so long."""
        self._decodes_s.append(duration_s)

    def add_prefill(self, num_tokens: int, duration_s: float) -> None:
        """A prompt pass took so long beside a decode round."""
        # A pass that had less to do than it was allowed tells nothing of a full one.
        if not self._decodes_s or num_tokens < self._beside_decodes:
            return
        wanted_s = (self.stretch - 1) * median(self._decodes_s)
        change = min(max(wanted_s / max(duration_s, 1e-9), 1 / _GROWTH), _GROWTH)
        floor = min(_FEWEST_TOKENS, self.max_tokens)
        self._beside_decodes = min(max(round(num_tokens * change), floor), self.max_tokens)
