"""What an engine has done, over all its requests."""

from dataclasses import dataclass, field

from sparkgap.engine.request import SpeculationCounts
from sparkgap.rounds.sequence import RoundOutput


@dataclass
class EngineCounters:
    """Counts since the engine started. Written by the thread that steps; any thread may read single numbers.

    Attributes:
        prompt_tokens: tokens that passes over prompts computed; a preempted request's are counted again.
        generation_tokens: output tokens.
        preemptions: how often a sequence gave up its KV blocks.
        speculation: what speculation did.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def add(self, output: RoundOutput, num_new_tokens: int) -> None:
        """Count one round of one sequence, of which `num_new_tokens` tokens were kept."""
        self.generation_tokens += num_new_tokens
        self.speculation.add(output)
