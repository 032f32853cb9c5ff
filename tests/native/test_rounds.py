"""What chains rounds on the device, against its torch reference."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgap.device.cpu import CpuGraph
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.rounds import RoundStatus, continues_run
from sparkgap.ops.torch_kernels import TorchKernels

REFERENCE = TorchKernels()
MAX_LENGTH, BLOCK_SIZE, CONTEXT_LENGTH = 70, 4, 61
MAX_BLOCKS = -(-MAX_LENGTH // BLOCK_SIZE)
some = settings(deadline=None, max_examples=80)


def random_round(sequences: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """Inputs of every operation of a round, edges among them: padding, the context's end, all and no drafts right."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows = sequences * width
    pads = torch.rand(sequences, generator=generator) < 0.2
    positions = torch.where(
        torch.rand(sequences, generator=generator) < 0.3,
        integers(MAX_LENGTH - width, MAX_LENGTH, sequences),
        integers(0, MAX_LENGTH, sequences),
    ).masked_fill(pads, 0)
    # Few different tokens, so that long prefixes match.
    drafts = integers(0, 2, width - 1, sequences).t() if width > 1 else None
    scores = torch.randn(rows, generator=generator)
    scores[torch.rand(rows, generator=generator) < 0.05] = torch.nan
    draft_scores = torch.randn(width - 1, sequences, generator=generator).t() if width > 1 else None
    if draft_scores is not None and torch.rand(1, generator=generator) < 0.3:
        draft_scores[0, 0] = torch.inf
    looks_up = width > 1 and torch.rand(1, generator=generator) < 0.5
    if looks_up and torch.rand(1, generator=generator) < 0.5:
        draft_scores = None  # without a drafter
    values: dict[str, Any] = {
        "sources": integers(-1, 9, sequences).int(),
        "staged_anchors": integers(0, 99, sequences),
        "staged_positions": integers(0, 99, sequences),
        "state_anchors": integers(100, 199, 9),
        "state_positions": integers(100, 199, 9),
        "positions": positions,
        "anchors": integers(0, 99, sequences),
        "draft_ids": drafts,
        "draft_scores": draft_scores,
        "runs": integers(0, 3, sequences).int() if looks_up else None,
        "block_tables": integers(0, 500, sequences, MAX_BLOCKS).int(),
        "num_blocks": torch.full((sequences,), MAX_BLOCKS).masked_fill(pads, 0).int(),
        "picks": integers(0, 2, rows),
        "scores": scores,
    }
    return values


def run(kernels: Any, given: dict[str, Any], sequences: int, width: int, *, graph: bool = False) -> dict[str, Any]:
    """All operations one after the other; what they fill, which starts as rubbish."""
    rows = sequences * width
    filled: dict[str, Any] = {
        name: torch.full((size,), -7)
        for name, size in {
            "anchors": sequences,
            "positions": sequences,
            "token_ids": rows,
            "row_positions": rows,
            "slots": rows,
            "context_positions": rows,
            "context_slots": rows,
            "next_anchors": sequences,
            "next_positions": sequences,
        }.items()
    }
    filled["results"] = torch.full((sequences, width + 2), -7)
    state = (given["state_anchors"].clone(), given["state_positions"].clone())

    def compute() -> None:
        kernels.begin_round(
            given["sources"],
            given["staged_anchors"],
            given["staged_positions"],
            given["state_anchors"],
            given["state_positions"],
            filled["anchors"],
            filled["positions"],
        )
        kernels.verify_rows(
            given["anchors"],
            given["positions"],
            given["draft_ids"],
            given["block_tables"],
            given["num_blocks"],
            BLOCK_SIZE,
            MAX_LENGTH,
            filled["token_ids"],
            filled["row_positions"],
            filled["slots"],
        )
        kernels.settle_round(
            given["picks"],
            given["scores"],
            given["draft_ids"],
            given["draft_scores"],
            given["runs"],
            given["positions"],
            filled["row_positions"],
            filled["slots"],
            CONTEXT_LENGTH,
            filled["context_positions"],
            filled["context_slots"],
            filled["next_anchors"],
            filled["next_positions"],
            filled["results"],
        )
        kernels.hand_off(filled["next_anchors"], filled["next_positions"], *state)

    if graph:
        recorded = CpuGraph(kernels.executor)
        with recorded.capture():
            compute()
        assert (filled["results"] == -7).all()
        recorded.replay()
    else:
        compute()
    return filled | {"state_anchors": state[0], "state_positions": state[1]}


@pytest.mark.parametrize("threads", [1, 3])
@some
@given(sequences=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 10**6), graph=st.booleans())
def test_equals_the_reference(threads: int, sequences: int, width: int, seed: int, graph: bool) -> None:
    values = random_round(sequences, width, seed)
    ours = run(NativeKernels(threads=threads), values, sequences, width, graph=graph)
    expected = run(REFERENCE, values, sequences, width)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@some
@given(sequences=st.integers(1, 6), width=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_settles_as_one_would_by_hand(sequences: int, width: int, seed: int) -> None:
    values = random_round(sequences, width, seed)
    ours = run(NativeKernels(threads=1), values, sequences, width)
    picks, drafts = values["picks"].view(sequences, width).tolist(), values["draft_ids"].tolist()
    scores = values["scores"].view(sequences, width)
    runs = [0] * sequences if values["runs"] is None else values["runs"].tolist()
    for i, (accepted, status, *tokens) in enumerate(ours["results"].tolist()):
        expected = 0
        has_drafts = runs[i] or values["draft_scores"] is not None
        while has_drafts and expected < width - 1 and picks[i][expected] == drafts[i][expected]:
            expected += 1
        assert accepted == expected
        assert tokens == picks[i]
        assert ours["next_anchors"][i] == picks[i][expected]
        assert ours["next_positions"][i] == values["positions"][i] + expected + 1
        if not scores[i, : expected + 1].isfinite().all():
            assert status == RoundStatus.TARGET_NOT_FINITE
        elif has_drafts and not runs[i] and not values["draft_scores"][i].isfinite().all():
            assert status == RoundStatus.DRAFTER_NOT_FINITE
        else:
            assert status == RoundStatus.GOOD
        written = ours["context_slots"].view(sequences, width)[i] >= 0
        assert not written[expected + 1 :].any()


def test_a_row_without_its_block_and_a_missing_source_are_faults() -> None:
    kernels = NativeKernels(threads=1)
    values = random_round(2, 3, 1)
    values["positions"], values["num_blocks"] = torch.tensor([5, 30]), torch.tensor([2, 7], dtype=torch.int32)
    with pytest.raises(IndexError, match="block"):
        run(kernels, values, 2, 3)
    values = random_round(2, 3, 1)
    values["sources"] = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(IndexError, match="state between rounds"):
        run(kernels, values, 2, 3)
    values = random_round(1, 3, 1)
    values["positions"], values["num_blocks"] = (
        torch.tensor([MAX_LENGTH]),
        torch.tensor([MAX_BLOCKS], dtype=torch.int32),
    )
    with pytest.raises(IndexError, match="position"):
        run(kernels, values, 1, 3)


def test_wrong_operands_are_refused() -> None:
    kernels = NativeKernels(threads=1)
    values = random_round(2, 3, 1)
    for name, wrong in {
        "sources": values["sources"].long(),
        "staged_anchors": values["staged_anchors"][:1],
        "draft_ids": None,
        "block_tables": values["block_tables"][:1],
        "scores": values["scores"].double(),
    }.items():
        with pytest.raises(ValueError, match=name):
            run(kernels, values | {name: wrong}, 2, 3)


@pytest.mark.parametrize("graph", [False, True])
@some
@given(
    sequences=st.integers(1, 5),
    count=st.integers(1, 9),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_looking_up_and_remembering_equal_the_reference(
    graph: bool, sequences: int, count: int, shortest: int, more: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacity = 40
    texts = torch.randint(0, 3, (7, capacity), generator=generator, dtype=torch.int32)
    text_rows = torch.randperm(7, generator=generator)[:sequences].int()
    text_rows[torch.rand(sequences, generator=generator) < 0.2] = -1
    positions = torch.randint(0, capacity, (sequences,), generator=generator)
    draft_ids = torch.randint(50, 60, (count, sequences), generator=generator).t()
    results = torch.randint(0, 3, (sequences, count + 3), generator=generator)
    results[:, 0] = torch.randint(0, count + 1, (sequences,), generator=generator)

    lengths = (shortest, shortest + more)

    def run_both(kernels: Any, filled: tuple[torch.Tensor, ...]) -> None:
        drafts, texts, runs, wants_draft = filled
        kernels.look_up(texts, text_rows, positions, lengths, drafts, runs, wants_draft)
        kernels.fill_drafts(draft_ids, runs, drafts)
        kernels.remember(texts, text_rows, positions, results)

    ours, expected = (
        (
            torch.full((sequences, count), -7),
            texts.clone(),
            torch.full((sequences,), -7, dtype=torch.int32),
            torch.tensor([-7]),
        )
        for _ in range(2)
    )
    kernels = NativeKernels(threads=2)
    if graph:
        recorded = CpuGraph(kernels.executor)
        with recorded.capture():
            run_both(kernels, ours)
        assert (ours[0] == -7).all()
        recorded.replay()
    else:
        run_both(kernels, ours)
    run_both(REFERENCE, expected)
    for filled, reference in zip(ours, expected, strict=True):
        assert torch.equal(filled, reference)
    drafts, _, runs, wants_draft = ours
    assert ((runs >= shortest) | (drafts == draft_ids).all(1)).all()
    is_looked_up = [run > 0 for run, row in zip(runs.tolist(), text_rows.tolist(), strict=True) if row >= 0]
    assert wants_draft.item() == (not is_looked_up or not all(is_looked_up))
    # What was not found is left as it is.
    kernels.look_up(texts, text_rows, positions, lengths, untouched := torch.full_like(drafts, -7), runs, wants_draft)
    assert torch.equal(untouched, torch.where((runs > 0)[:, None], drafts, -7))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("tokens", "run"), [(3, 2), (9, 8), (64, 63), (65, 64), (66, 64), (90, 64)])
def test_the_length_of_a_run_is_counted_up_to_a_limit(native: bool, tokens: int, run: int) -> None:
    kernels = NativeKernels(threads=1) if native else REFERENCE
    texts, runs = torch.full((1, 100), 5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    row, drafts = torch.zeros(1, dtype=torch.int32), torch.zeros((1, 3), dtype=torch.int64)
    kernels.look_up(texts, row, torch.tensor([tokens - 1]), (2, 4), drafts, runs, torch.zeros(1, dtype=torch.int64))
    assert runs.item() == run


@pytest.mark.parametrize("graph", [False, True])
@some
@given(sequences=st.integers(1, 6), count=st.integers(1, 9), looks_up=st.booleans(), seed=st.integers(0, 10**6))
def test_the_chosen_length_is_the_references(
    graph: bool, sequences: int, count: int, looks_up: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    confidences = torch.rand((count, sequences), generator=generator).t()
    if seed % 5 == 0:
        confidences[0, seed % count] = torch.nan
    runs = torch.randint(0, 9, (sequences,), generator=generator).int() if looks_up else None
    num_blocks = (torch.rand(sequences, generator=generator) < 0.7).int() * 3
    some_lengths = torch.rand(count + 1, generator=generator) < 0.7
    some_lengths[seed % (count + 1)] = True
    lengths = some_lengths.nonzero()[:, 0].contiguous()
    costs = (1 + torch.rand(len(lengths), generator=generator, dtype=torch.float64)).cumsum(0)
    growth = torch.rand(len(lengths), generator=generator, dtype=torch.float64).cumsum(0) / 50
    positions = torch.randint(0, 99, (sequences,), generator=generator)
    draft_cost = torch.rand(1, generator=generator, dtype=torch.float64)
    wants_draft = torch.tensor([seed % 2]) if looks_up else None
    given = (confidences, runs, num_blocks, positions, lengths, costs, growth, draft_cost, wants_draft)
    ours, expected = torch.tensor([-7]), torch.tensor([-7])
    kernels = NativeKernels(threads=2)
    if graph:
        recorded = CpuGraph(kernels.executor)
        with recorded.capture():
            kernels.choose_length(*given, ours)
        assert ours.item() == -7
        recorded.replay()
    else:
        kernels.choose_length(*given, ours)
    REFERENCE.choose_length(*given, expected)
    assert torch.equal(ours, expected)
    used = confidences[(num_blocks > 0) & (runs == 0 if runs is not None else True), : int(lengths[-1])]
    if not num_blocks.any() or used.isnan().any():
        assert ours.item() == len(lengths) - 1
        return
    # By hand: the best of all, and no shorter one is as good.
    survival = [[confidences[i, : k + 1].double().prod().item() for k in range(count)] for i in range(sequences)]
    for i, run in enumerate(runs.tolist() if runs is not None else []):
        if run:
            steps = [continues_run(run + k) for k in range(count)]
            survival[i] = [torch.tensor(steps[: k + 1], dtype=torch.float64).prod().item() for k in range(count)]
    in_use = [i for i in range(sequences) if num_blocks[i]]
    totals = costs + growth * sum(int(positions[i]) for i in in_use)
    if wants_draft is None or wants_draft.item():
        totals += draft_cost
    rates = [
        sum(1 + sum(survival[i][:length]) for i in in_use) / cost
        for length, cost in zip(lengths.tolist(), totals.tolist(), strict=True)
    ]
    if not any(math.isnan(rate) for rate in rates):
        assert rates[ours.item()] == pytest.approx(max(rates))


def test_wrong_operands_of_a_choice_are_refused() -> None:
    kernels = NativeKernels(threads=1)
    good = {
        "confidences": torch.rand(2, 3),
        "runs": torch.zeros(2, dtype=torch.int32),
        "num_blocks": torch.ones(2, dtype=torch.int32),
        "positions": torch.tensor([3, 4]),
        "lengths": torch.tensor([1, 3]),
        "costs": torch.ones(2, dtype=torch.float64),
        "growth": torch.ones(2, dtype=torch.float64),
        "draft_cost": torch.ones(1, dtype=torch.float64),
        "wants_draft": torch.tensor([1]),
        "chosen": torch.tensor([0]),
    }
    kernels.choose_length(*good.values())
    for name, wrong in {
        "confidences": torch.rand(2, 3).double(),
        "runs": torch.zeros(3, dtype=torch.int32),
        "num_blocks": torch.ones(2),
        "positions": torch.tensor([3]),
        "lengths": torch.tensor([3, 1]),
        "costs": torch.ones(3, dtype=torch.float64),
        "growth": torch.ones(2),
        "draft_cost": torch.ones(2, dtype=torch.float64),
        "wants_draft": torch.tensor([1.0]),
        "chosen": torch.tensor([0, 0]),
    }.items():
        with pytest.raises(ValueError, match=name):
            kernels.choose_length(*(good | {name: wrong}).values())


@pytest.mark.parametrize("accepted", [-1, 3, 2**40])
def test_more_accepted_tokens_than_a_round_has_are_a_fault(accepted: int) -> None:
    results = torch.tensor([[accepted, 0, 11, 12, 13]])
    for kernels in (NativeKernels(threads=1), REFERENCE):
        texts, position = torch.zeros((1, 9), dtype=torch.int32), torch.tensor([2])
        with pytest.raises(IndexError):
            kernels.remember(texts, torch.tensor([0], dtype=torch.int32), position, results)
        assert not texts.any()
        # A sequence that only pads has no result worth a look.
        kernels.remember(texts, torch.tensor([-1], dtype=torch.int32), position, results)
        kernels.remember(texts[:0], torch.zeros(0, dtype=torch.int32), position[:0], results[:0])


def test_a_text_that_is_not_there_is_a_fault_and_wrong_lengths_are_refused() -> None:
    kernels = NativeKernels(threads=1)
    texts, positions = torch.zeros((2, 5), dtype=torch.int32), torch.tensor([3])
    filled = (torch.zeros((1, 2), dtype=torch.int64), torch.zeros(1, dtype=torch.int32), torch.tensor([0]))
    with pytest.raises(IndexError, match="state between rounds"):
        kernels.look_up(texts, torch.tensor([2], dtype=torch.int32), positions, (1, 2), *filled)
    row = torch.tensor([1], dtype=torch.int32)
    for lengths in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="shortest"):
            kernels.look_up(texts, row, positions, lengths, *filled)
    with pytest.raises(ValueError, match="texts"):
        kernels.look_up(texts.long(), row, positions, (1, 2), *filled)
    for name, wrong in (
        ("drafts", (filled[0][0], *filled[1:])),
        ("runs", (filled[0], filled[1].long(), filled[2])),
        ("wants_draft", (*filled[:2], filled[2].int())),
    ):
        with pytest.raises(ValueError, match=name):
            kernels.look_up(texts, row, positions, (1, 2), *wrong)
    for wrong in ((filled[0].int(), filled[1], filled[0]), (filled[0], filled[1], filled[0].t())):
        with pytest.raises(ValueError, match=r"proposed|drafts"):
            kernels.fill_drafts(*wrong)


@some
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31), st.booleans())
def test_step_rows_are_the_references(sequences: int, steps: int, seed: int, graph: bool) -> None:
    """Contexts of any length up to the table's, sequences that only pad, and rows beyond the end."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, MAX_LENGTH + 1, (sequences,), generator=generator)
    lengths[torch.rand(sequences, generator=generator) < 0.3] = MAX_LENGTH
    tables = torch.randint(0, 500, (sequences, MAX_BLOCKS), generator=generator).int()
    max_length = int(torch.randint(int(lengths.max().clamp(min=1)), 2 * MAX_LENGTH, (1,), generator=generator))
    kernels = NativeKernels(threads=1)
    operands = (lengths, tables, steps, BLOCK_SIZE, max_length)
    expected = REFERENCE.step_rows(*operands)
    if graph:
        recorded = CpuGraph(kernels.executor)
        with recorded.capture():
            found = kernels.step_rows(*operands)
        recorded.replay()
    else:
        found = kernels.step_rows(*operands)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    limit = min(max_length, MAX_BLOCKS * BLOCK_SIZE)
    for sequence, length in enumerate(lengths.tolist()):
        for step in range(steps):
            position, slot = int(found.positions[step, sequence]), int(found.slots[step, sequence])
            wanted = length - 1 + step
            if length == 0:
                assert (position, slot, int(found.sources[sequence])) == (0, -1, 0)
                continue
            assert position == min(wanted, limit - 1)
            block = int(tables[sequence, position // BLOCK_SIZE])
            place = block * BLOCK_SIZE + position % BLOCK_SIZE
            assert slot == (place if step > 0 and wanted < limit else -1)
            if step == 0:
                assert int(found.sources[sequence]) == place


@pytest.mark.parametrize("length", [-1, MAX_BLOCKS * BLOCK_SIZE + 1])
def test_step_rows_of_a_context_out_of_range(length: int) -> None:
    tables = torch.zeros((1, MAX_BLOCKS), dtype=torch.int32)
    with pytest.raises(IndexError):
        NativeKernels(threads=1).step_rows(torch.tensor([length]), tables, 3, BLOCK_SIZE, 2 * MAX_LENGTH)


@pytest.mark.parametrize("reduced", [False, True])
def test_the_picked_draft_token_is_the_references(reduced: bool) -> None:
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = torch.nan
    logits[2] = 0.0
    ids = torch.arange(37).flip(0) * 2 if reduced else None
    found = []
    for kernels in (NativeKernels(threads=1), REFERENCE):
        token_ids, scores = torch.zeros(5, dtype=torch.int64), torch.zeros(5)
        kernels.draft_pick(logits, ids, token_ids, scores)
        found.append((token_ids, scores))
    (ours, our_scores), (theirs, their_scores) = found
    assert torch.equal(ours, theirs)
    assert torch.equal(our_scores.nan_to_num(-7.0), their_scores.nan_to_num(-7.0))
