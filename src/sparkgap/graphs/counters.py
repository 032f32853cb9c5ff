"""Counts that prove which passes were replays."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["target", "draft", "context"]
"""Kinds of passes. They never share a graph."""

FAMILIES: tuple[Family, ...] = ("target", "draft", "context")
"""All kinds of passes."""


@dataclass
class GraphCounters:
    """Counts since the engine started. Passes over prompts are not decode passes and are not counted.

    Attributes:
        captures_at_startup: graphs captured before the first request.
        captures_since_startup: captures since; stays 0.
        replays: passes that were replays, by family.
        eager: decode passes outside a declared capacity, which ran eagerly, by family and reason.
        capture_ms: time that the captures took.
        memory_bytes: what the graphs' inputs, results and workspaces take.
    """

    captures_at_startup: int = 0
    captures_since_startup: int = 0
    replays: Counter[Family] = field(default_factory=Counter)
    eager: Counter[tuple[Family, str]] = field(default_factory=Counter)
    capture_ms: float = 0.0
    memory_bytes: int = 0

    def summary(self) -> str:
        """What was captured, in one line."""
        return (
            f"captured {self.captures_at_startup} graphs in {self.capture_ms / 1000:.2f} s, "
            f"{self.memory_bytes / 2**20:.1f} MiB"
        )

    def report(self) -> dict[str, Any]:
        """The counts as a JSON object; `eager` by reason, over all families."""
        reasons: Counter[str] = Counter()
        # A copy in one operation, since another thread may be counting.
        for (_, reason), count in list(self.eager.items()):
            reasons[reason] += count
        return {
            "captures_at_startup": self.captures_at_startup,
            "captures_since_startup": self.captures_since_startup,
            "replays": {family: self.replays[family] for family in FAMILIES},
            "eager": dict(reasons),
        }
