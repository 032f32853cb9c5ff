"""Sends requests: as many as may run at once, or each at its own time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from sparkgap.bench.serving.client import Answer, Question, ask
from sparkgap.bench.serving.workload import LoadRequest


@dataclass(frozen=True)
class LoadResult:
    """Answers of all requests, in the requests' order.

    Attributes:
        answers: complete ones and failed ones.
        duration_s: from the first request to the last answer.
        peak_concurrency: most requests that were open together.
    """

    answers: list[Answer]
    duration_s: float
    peak_concurrency: int


async def run_load(
    client: httpx.AsyncClient,
    question: Question,
    requests: Sequence[LoadRequest],
    *,
    max_concurrency: int | None = None,
    advance: Callable[[int], None] = lambda number: None,
) -> LoadResult:
    """Send `requests` and read all answers.

    Args:
        client: of the server.
        question: what the requests have in common.
        requests: those with an arrival time are sent then (open loop), or as soon after as `max_concurrency` allows:
            their clock starts at the arrival. Those without are sent when another one has ended (closed loop).
        max_concurrency: most open requests; None for no limit.
        advance: told of each answer.
    """
    places = asyncio.Semaphore(max_concurrency or len(requests))
    num_open = peak = 0
    started_s = time.perf_counter()

    async def send(request: LoadRequest) -> Answer:
        """Wait for the request's arrival and a place, then for its answer."""
        nonlocal num_open, peak
        arrived_s = None
        if request.arrival_s is not None:
            arrived_s = started_s + request.arrival_s
            await asyncio.sleep(max(arrived_s - time.perf_counter(), 0))
        async with places:
            num_open += 1
            peak = max(peak, num_open)
            try:
                now_s = time.perf_counter()
                answer = await ask(client, question, request, now_s if arrived_s is None else arrived_s)
            finally:
                num_open -= 1
        advance(1)
        return answer

    answers = await asyncio.gather(*(send(request) for request in requests))
    return LoadResult(list(answers), time.perf_counter() - started_s, peak)
