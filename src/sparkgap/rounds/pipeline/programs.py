"""A whole round as one program for each Slot and number of sequences, captured at startup."""

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap import _native
from sparkgap.device.cpu import CpuGraph
from sparkgap.device.stream import Condition, CpuProgram
from sparkgap.errors import MissingBindingError
from sparkgap.graphs.captured import named_inputs
from sparkgap.graphs.counters import GraphCounters
from sparkgap.graphs.family import GraphFamily
from sparkgap.graphs.passes import DraftModel, Passes
from sparkgap.models.heads import Proposal
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.rounds.pipeline.scheduling import RoundCosts
from sparkgap.rounds.pipeline.slot import RoundState, Slot


class _TargetResults(NamedTuple):
    logits: Tensor
    captured: Tensor | None


class _Drafts(NamedTuple):
    """Draft tokens `[sequences, N]`; scores and confidences are the drafter's."""

    token_ids: Tensor
    scores: Tensor | None
    confidences: Tensor | None

    def first(self, count: int) -> "_Drafts":
        scores = None if self.scores is None else self.scores[:, :count]
        return _Drafts(self.token_ids[:, :count], scores, self.confidences)


class _Part(NamedTuple):
    name: str
    graph: CpuGraph
    condition: Condition | None = None


class SlotPrograms:
    """The rounds that a Slot can run: draft, verify, settle, update the context, hand the state on.

    Each part is a graph bound to the Slot's own tensors. Hidden states, logits and draft tokens lie in memory that
    belongs to the Slot too.

    Args:
        slot: whose tensors are read and written.
        state: what rounds begin from and leave.
        passes: target, caches and drafter.
        kernels: that compute them.
        counters: told of the captures.
        lookup_lengths: fewest and most last tokens that are looked up; None looks nothing up. Without a drafter, what
            is found are all draft tokens.
        max_drafting: most sequences of a round that drafts; the others are plain, and keep the drafter's context.
        costs: by which the device chooses how many draft tokens a round verifies; None verifies all.
    """

    def __init__(
        self,
        slot: Slot,
        state: RoundState,
        passes: Passes,
        kernels: NativeKernels,
        counters: GraphCounters,
        lookup_lengths: tuple[int, int] | None = None,
        max_drafting: int | None = None,
        costs: RoundCosts | None = None,
    ) -> None:
        self._slot = slot
        self._state = state
        self._passes = passes
        self._kernels = kernels
        self._counters = counters
        self._lookup_lengths = lookup_lengths
        self._max_drafting = max_drafting
        self._costs = costs
        executor = kernels.executor
        self._target: GraphFamily[_TargetResults] = GraphFamily("target", executor, counters)
        self._draft: GraphFamily[Proposal] = GraphFamily("draft", executor, counters)
        self._context: GraphFamily[None] = GraphFamily("context", executor, counters)
        self._arena = _native.Arena()
        # Where there is no drafter: a sequence for which nothing is found has nothing to expect.
        self._no_confidences = torch.zeros(slot.drafts.shape)
        self._between: list[CpuGraph] = []
        self._programs: dict[int, CpuProgram] = {}
        self._draft_passes: dict[int, CpuGraph] = {}
        self._target_passes: dict[tuple[int, int], CpuGraph] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the graphs and of what they compute."""
        families = (self._target, self._draft, self._context)
        return sum(family.nbytes for family in families) + sum(graph.nbytes for graph in self._between)

    def capture(self, buckets: Seq[int]) -> None:
        """Capture a program for each number of sequences, then let the smallest run once, writing no KV."""
        for bucket in sorted(buckets, reverse=True):
            self._programs[bucket] = self._capture(bucket)
        for family in (self._target, self._draft, self._context):
            family.close()
        # Until it is first staged, a Slot holds nothing but sequences that only pad.
        self._programs[min(buckets)].replay()

    def of(self, bucket: int) -> CpuProgram:
        """The program for `bucket` sequences.

        Raises:
            MissingBindingError: none was captured.
        """
        program = self._programs.get(bucket)
        if program is None:
            raise MissingBindingError(
                f"no round of {bucket} sequences is bound to this Slot, and there is no capture after startup"
            )
        return program

    def widths(self, bucket: int) -> tuple[int, ...]:
        """Rows that each sequence may have in rounds of `bucket` sequences, rising: 1 where they do not draft."""
        if self._max_drafting is not None and bucket > self._max_drafting:
            return (1,)
        return (self._slot.shape.width,) if self._costs is None else self._costs.widths

    def measure(self, costs: RoundCosts) -> None:
        """Time the passes that rounds of each drafting number of sequences may take. Writes no KV."""
        slot = self._slot

        def move_to(position: int) -> None:
            slot.row_positions.fill_(min(position, slot.shape.max_model_len - 1))

        for bucket in costs.timed_buckets:
            targets = [self._target_passes[bucket, width] for width in costs.widths]
            costs.measure(bucket, self._draft_passes.get(bucket), targets)
        alone = [self._target_passes[1, width] for width in costs.widths]
        costs.measure_growth(alone, move_to, slot.shape.max_model_len)
        slot.row_positions.zero_()

    def _capture(self, bucket: int) -> CpuProgram:
        model, widths = self._passes.drafting, self.widths(bucket)
        chooses = len(widths) > 1
        parts = [_Part(*self._record("begin", lambda: self._begin(bucket)))]
        drafts: _Drafts | None = None
        if widths[-1] > 1:
            finding, drafts = self._capture_drafts(bucket, model)
            parts += finding
            if chooses:
                parts.append(_Part(*self._record("choose", functools.partial(self._choose, bucket, drafts))))
        for choice, width in enumerate(widths):
            condition = Condition(self._slot.choice, choice) if chooses else None
            verification = self._capture_verification(bucket, width, drafts)
            parts += [_Part(name, graph, condition) for name, graph in verification]
        parts.append(_Part(*self._record("hand off", lambda: self._hand_off(bucket))))
        return CpuProgram(
            [(part.name, part.graph) for part in parts],
            ("target",) if drafts is None or model is None else ("draft", "target"),
            [part.condition for part in parts],
        )

    def _capture_drafts(self, bucket: int, model: DraftModel | None) -> tuple[list[_Part], _Drafts]:
        """From where the round begins to its draft tokens, and these. What is looked up for all is not drafted."""
        parts, found = [], self._slot.drafts[:bucket]
        if self._lookup_lengths is not None:
            parts.append(_Part(*self._record("look up", lambda: self._look_up(bucket))))
        if model is None:
            return parts, _Drafts(found, None, self._no_confidences[:bucket])
        graph, proposal = self._capture_draft(bucket, model)
        self._draft_passes[bucket] = graph
        if self._lookup_lengths is None:
            return [_Part("draft", graph)], _Drafts(proposal.token_ids, proposal.scores, proposal.confidences)
        fill = functools.partial(self._kernels.fill_drafts, proposal.token_ids, self._slot.runs[:bucket], found)
        wanted = Condition(self._slot.wants_draft, 1)
        parts += [_Part("draft", graph, wanted), _Part(*self._record("fill", fill), wanted)]
        return parts, _Drafts(found, proposal.scores, proposal.confidences)

    def _capture_verification(self, bucket: int, width: int, drafts: _Drafts | None) -> list[tuple[str, CpuGraph]]:
        """A round from its rows to its results, for `width` rows of each sequence: so many draft tokens less one."""
        model = self._passes.drafting
        drafts = None if drafts is None else drafts.first(width - 1)
        parts = [self._record("lay out", lambda: self._lay_out(bucket, width, drafts))]
        graph, results = self._capture_target(bucket, width)
        self._target_passes[bucket, width] = graph
        parts.append(("target", graph))
        parts.append(self._record("settle", lambda: self._settle(bucket, width, results.logits, drafts)))
        if model is not None:
            assert results.captured is not None
            parts.append(("context", self._capture_context(bucket, width, results.captured, model)))
        if self._lookup_lengths is not None:
            parts.append(self._record("remember", lambda: self._remember(bucket, width)))
        return parts

    def _record(self, name: str, compute: Callable[[], None]) -> tuple[str, CpuGraph]:
        """A graph of what lies between the passes."""
        graph = CpuGraph(self._kernels.executor, self._arena, name)
        with graph.capture():
            compute()
        self._counters.captures_at_startup += 1
        self._between.append(graph)
        return name, graph

    def _begin(self, bucket: int) -> None:
        slot, state = self._slot, self._state
        self._kernels.begin_round(
            slot.sources[:bucket],
            slot.staged_anchors[:bucket],
            slot.staged_positions[:bucket],
            state.anchors,
            state.positions,
            slot.anchors[:bucket],
            slot.positions[:bucket],
        )

    def _capture_draft(self, bucket: int, model: DraftModel) -> tuple[CpuGraph, Proposal]:
        slot = self._slot
        inputs = {
            "anchors": slot.anchors[:bucket],
            "context_lengths": slot.positions[:bucket],
            "block_tables": slot.block_tables[:bucket],
        }
        proposal = self._draft.capture(inputs, lambda: Passes.propose(self._passes, **inputs, max_length=0))
        return self._draft.graph(inputs), proposal

    def _look_up(self, bucket: int) -> None:
        slot = self._slot
        assert self._lookup_lengths is not None
        self._kernels.look_up(
            self._state.texts,
            slot.text_rows[:bucket],
            slot.positions[:bucket],
            self._lookup_lengths,
            slot.drafts[:bucket],
            slot.runs[:bucket],
            slot.wants_draft,
        )

    def _choose(self, bucket: int, drafts: _Drafts) -> None:
        slot, costs = self._slot, self._costs
        assert costs is not None
        assert drafts.confidences is not None
        self._kernels.choose_length(
            drafts.confidences,
            self._runs(bucket),
            slot.num_blocks[:bucket],
            slot.positions[:bucket],
            costs.lengths,
            costs.of(bucket),
            costs.growth,
            costs.draft_of(bucket),
            None if self._lookup_lengths is None else slot.wants_draft,
            slot.choice,
        )

    def _runs(self, bucket: int) -> Tensor | None:
        return None if self._lookup_lengths is None else self._slot.runs[:bucket]

    def _remember(self, bucket: int, width: int) -> None:
        slot = self._slot
        self._kernels.remember(
            self._state.texts,
            slot.text_rows[:bucket],
            slot.positions[:bucket],
            slot.results_of(bucket, width),
        )

    def _lay_out(self, bucket: int, width: int, drafts: _Drafts | None) -> None:
        slot, shape = self._slot, self._slot.shape
        end = bucket * width
        self._kernels.verify_rows(
            slot.anchors[:bucket],
            slot.positions[:bucket],
            None if drafts is None else drafts.token_ids,
            slot.block_tables[:bucket],
            slot.num_blocks[:bucket],
            shape.block_size,
            shape.max_model_len,
            slot.token_ids[:end],
            slot.row_positions[:end],
            slot.slots[:end],
        )

    def _capture_target(self, bucket: int, width: int) -> tuple[CpuGraph, _TargetResults]:
        passes, batch = self._passes, self._slot.batch(bucket, width)
        inputs = named_inputs(batch)

        def compute() -> _TargetResults:
            result = passes.target.forward(batch, passes.caches, passes.captured_layers)
            return _TargetResults(passes.target.logits(result.hidden), result.captured)

        results = self._target.capture(inputs, compute)
        return self._target.graph(inputs), results

    def _settle(self, bucket: int, width: int, logits: Tensor, drafts: _Drafts | None) -> None:
        slot, model = self._slot, self._passes.drafting
        end = bucket * width
        picks, scores = slot.picks[:end], slot.scores[:end]
        sampling = slot.sampling
        self._kernels.draw_tokens(
            logits,
            sampling.temperatures[:bucket],
            sampling.log_min_p[:bucket],
            sampling.top_k[:bucket],
            sampling.top_p[:bucket],
            sampling.seeds[:bucket],
            slot.positions[:bucket],
            picks,
            scores,
        )
        self._kernels.settle_round(
            picks,
            scores,
            None if drafts is None else drafts.token_ids,
            None if drafts is None else drafts.scores,
            None if drafts is None else self._runs(bucket),
            slot.positions[:bucket],
            slot.row_positions[:end],
            slot.slots[:end],
            0 if model is None else model.drafter.max_context_length,
            None if model is None else slot.context_positions[:end],
            None if model is None else slot.context_slots[:end],
            slot.next_anchors[:bucket],
            slot.next_positions[:bucket],
            slot.results_of(bucket, width),
        )

    def _capture_context(self, bucket: int, width: int, captured: Tensor, model: DraftModel) -> CpuGraph:
        end = bucket * width
        positions, slots = self._slot.context_positions[:end], self._slot.context_slots[:end]
        # The target's own token of an accepted row is the one that follows it.
        inputs = {"captured": captured, "positions": positions, "slots": slots, "following": self._slot.picks[:end]}
        # Rounds of several sequences may have as many rows together as a round of fewer.
        if inputs not in self._context:
            self._context.capture(inputs, lambda: model.drafter.context_update(**inputs, caches=model.caches))
        return self._context.graph(inputs)

    def _hand_off(self, bucket: int) -> None:
        slot, state = self._slot, self._state
        self._kernels.hand_off(slot.next_anchors[:bucket], slot.next_positions[:bucket], state.anchors, state.positions)
