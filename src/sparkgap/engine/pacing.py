"""How many prompt tokens a step computes, so that running requests keep their pace while a prompt is read."""

from collections import Counter, deque
from statistics import median

_FIRST_TOKENS = 16
"""Prompt tokens of the first step beside decodes, before such a step was measured."""

_GROWTH = 1.5
"""Most that the number of tokens changes by from one step to the next: one slow pass must not mean much."""

_RECENT_STEPS = 9
"""Steps without prompt tokens whose median is the pace."""

_STEPS_ALONE = 2
"""Most steps that leave prompts out so that the pace of so many sequences becomes known."""


class PrefillPacer:
    """Chooses the number of prompt tokens of a step.

    A step that also decodes computes as many prompt tokens as let it take `stretch` times as long as a step that only
    decodes as many sequences. That is how much later a running request's tokens come while prompts are read, whatever
    the model, the machine, the number of requests and the length of the prompts. The number decides when tokens come,
    never which.

    Whole steps are compared, because a round in flight and a prompt's pass share the processor: neither has a duration
    of its own.

    Attributes:
        max_tokens: most prompt tokens of any step.
        stretch: see above; above 1.
        fixed_tokens: most prompt tokens of a step that also decodes; None measures.
        multiple: what is measured is rounded down to: passes over few tokens are padded to it.
    """

    def __init__(self, max_tokens: int, stretch: float, fixed_tokens: int | None = None, multiple: int = 1) -> None:
        self.max_tokens = max_tokens
        self.stretch = stretch
        self.fixed_tokens = fixed_tokens
        self.multiple = multiple
        self._beside_decodes = float(_FIRST_TOKENS)
        self._alone_s: dict[int, deque[float]] = {}
        self._steps_alone: Counter[int] = Counter()

    def num_tokens(self, num_decodes: int) -> int:
        """Most prompt tokens of a step that decodes so many sequences.

        0 where it is not known yet how long they take alone.
        """
        if not num_decodes:
            return self.max_tokens
        if self.fixed_tokens is not None:
            return min(self.max_tokens, self.fixed_tokens)
        if num_decodes not in self._alone_s and self._steps_alone[num_decodes] < _STEPS_ALONE:
            self._steps_alone[num_decodes] += 1
            return 0
        return self._most_beside_decodes

    @property
    def _most_beside_decodes(self) -> int:
        whole = int(self._beside_decodes) // self.multiple * self.multiple
        return min(max(whole, self.multiple), self.max_tokens)

    def add_step(self, num_decodes: int, num_tokens: int, duration_s: float) -> None:
        """A step that decoded so many sequences and computed so many prompt tokens took so long."""
        if not num_tokens:
            self._alone_s.setdefault(num_decodes, deque(maxlen=_RECENT_STEPS)).append(duration_s)
            return
        alone_s = self._alone_s.get(num_decodes)
        # A pass that had less to do than it was allowed tells nothing of a full one.
        if alone_s is None or num_tokens < self._most_beside_decodes:
            return
        pace_s = median(alone_s)
        wanted_s, taken_s = (self.stretch - 1) * pace_s, max(duration_s - pace_s, 1e-9)
        change = min(max(wanted_s / taken_s, 1 / _GROWTH), _GROWTH)
        floor = min(self.multiple, self.max_tokens)
        self._beside_decodes = min(max(self._beside_decodes * change, floor), float(self.max_tokens))
