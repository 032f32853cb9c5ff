"""What a Slot holds of a sequence is the sequence's, whatever was interrupted."""

import pytest
import torch

from sparkgap.config import SamplingParams
from sparkgap.rounds.pipeline import slot as slot_module
from sparkgap.rounds.pipeline.slot import RoundShape, Slot
from sparkgap.rounds.sequence import Sequence


def sequence(number: int, temperature: float, *blocks: int) -> Sequence:
    params = SamplingParams(temperature=temperature, seed=number)
    return Sequence(number, params, number, [5], output_token_ids=[6], num_computed_tokens=1, block_table=list(blocks))


def staged(slot: Slot) -> tuple[float, int, list[int]]:
    """Temperature, seed and blocks of row 0."""
    count = int(slot.num_blocks[0])
    return slot.sampling.temperatures[0].item(), int(slot.sampling.seeds[0]), slot.block_tables[0, :count].tolist()


@pytest.mark.parametrize("place", ["SamplingNumbers.of", "as_int64"])
def test_a_row_that_was_staged_in_part_is_staged_anew(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    slot = Slot(RoundShape(max_sequences=1, width=2, block_size=4, max_model_len=16))
    first, other = sequence(1, 0.5, 3, 4), sequence(2, 0.75, 7)
    slot.stage([first], [-1], [-1], 1)
    assert staged(slot) == (0.5, 1, [3, 4])

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        target, _, name = place.rpartition(".")
        patch.setattr(getattr(slot_module, target) if target else slot_module, name, fail)
        with pytest.raises(MemoryError):
            slot.stage([other], [-1], [-1], 1)
    slot.stage([first], [-1], [-1], 1)
    assert staged(slot) == (0.5, 1, [3, 4])


def test_what_a_sequence_has_staged_is_not_staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(RoundShape(max_sequences=2, width=2, block_size=4, max_model_len=16))
    first = sequence(1, 0.5, 3)
    slot.stage([first], [-1], [-1], 2)
    first.block_table.append(9)
    monkeypatch.setattr(slot.sampling, "stage", lambda *_: pytest.fail("it has been staged"))
    slot.block_tables[0, 0] = 3
    slot.stage([first], [0], [-1], 2)
    assert staged(slot) == (0.5, 1, [3, 9])
    assert torch.equal(slot.num_blocks, torch.tensor([2, 0], dtype=torch.int32))
