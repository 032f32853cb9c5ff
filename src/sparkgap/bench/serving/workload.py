"""What is asked of a server, and when."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparkgap.bench.prompts import BenchPrompt

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
)
"""Common words, most of which are one token of most vocabularies."""


@dataclass(frozen=True)
class LoadRequest:
    """One request to send.

    Attributes:
        prompt: text; a user message of a chat, or the beginning of a completion.
        max_tokens: most output tokens.
        arrival_s: when it arrives, in seconds from the start; None as soon as an earlier one has ended.
    """

    prompt: str
    max_tokens: int
    arrival_s: float | None = None


def from_prompts(prompts: Sequence[BenchPrompt], number: int, max_tokens: int) -> list[LoadRequest]:
    """Requests with the prompts in turn, again from the first when they run out."""
    return [LoadRequest(prompts[i % len(prompts)].text, max_tokens) for i in range(number)]


def synthetic(number: int, input_tokens: int, max_tokens: int, seed: int) -> list[LoadRequest]:
    """Requests with prompts of random words, about as many as `input_tokens`; no two begin alike.

    The tokens that they really have are the server's to count.
    """
    generator, words = random.Random(seed), _WORDS.split()
    return [LoadRequest(" ".join(generator.choices(words, k=input_tokens)), max_tokens) for _ in range(number)]


def with_poisson_arrivals(requests: Sequence[LoadRequest], rate_per_s: float, seed: int) -> list[LoadRequest]:
    """The requests with arrival times of a Poisson process, whatever the server makes of them: an open loop."""
    times = _poisson_times(rate_per_s, seed)
    return [LoadRequest(request.prompt, request.max_tokens, next(times)) for request in requests]


def _poisson_times(rate_per_s: float, seed: int) -> Iterator[float]:
    generator = random.Random(seed)
    now_s = 0.0
    while True:
        yield now_s
        now_s += generator.expovariate(rate_per_s)
