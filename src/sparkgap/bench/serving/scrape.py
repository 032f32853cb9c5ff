"""What a server's `/metrics` says of speculation; names are vLLM's, with any engine's prefix."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

_SAMPLE = re.compile(r"^(?:\w+:)?(\w+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+-]+)(?:\s+\d+)?$", re.ASCII)
_POSITION = re.compile(r'position="(\d+)"')
_DRAFTS = "spec_decode_num_drafts"
_DRAFTED = "spec_decode_num_draft_tokens"
_ACCEPTED = "spec_decode_num_accepted_tokens"
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class SpeculationSample:
    """Counts of speculation at one moment."""

    rounds: float
    drafted: float
    accepted: float
    accepted_by_position: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedSpeculation:
    """What speculation did between two moments, for all of a server's clients.

    Attributes:
        draft_rounds: rounds with draft tokens.
        draft_tokens: draft tokens verified.
        accepted_draft_tokens: draft tokens accepted.
        acceptance_rate: accepted / verified; None without any.
        accepted_per_round: accepted / rounds; None without any.
        acceptance_by_position: share of the rounds that accepted the token at each place of the draft.
    """

    draft_rounds: int
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance_rate: float | None
    accepted_per_round: float | None
    acceptance_by_position: list[float]


def parse_metrics(text: str) -> SpeculationSample | None:
    """The counts in a page in Prometheus' text format; None when it has none of speculation."""
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match[1].startswith("spec_decode_"):
            continue
        name, labels, value = match[1], match[2] or "", float(match[3])
        position = _POSITION.search(labels)
        if name == _BY_POSITION and position is not None:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    if _DRAFTED not in totals or _ACCEPTED not in totals:
        return None
    return SpeculationSample(totals.get(_DRAFTS, 0.0), totals[_DRAFTED], totals[_ACCEPTED], by_position)


async def scrape(client: httpx.AsyncClient) -> SpeculationSample | None:
    """The server's counts now; None when it has no `/metrics`, or none of speculation there."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    return parse_metrics(response.text) if response.status_code == httpx.codes.OK else None


def between(before: SpeculationSample | None, after: SpeculationSample | None) -> ServedSpeculation | None:
    """What happened from one sample to a later one; None where one is missing or nothing was drafted."""
    if before is None or after is None or after.drafted <= before.drafted:
        return None
    rounds, drafted = after.rounds - before.rounds, after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    positions = {
        place: n - before.accepted_by_position.get(place, 0) for place, n in after.accepted_by_position.items()
    }
    return ServedSpeculation(
        draft_rounds=int(rounds),
        draft_tokens=int(drafted),
        accepted_draft_tokens=int(accepted),
        acceptance_rate=accepted / drafted,
        accepted_per_round=accepted / rounds if rounds else None,
        acceptance_by_position=[positions[place] / rounds for place in sorted(positions)] if rounds else [],
    )
