"""The plain runner: what it asks of its target, and that a sequence's output depends on its own tokens alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgap import LLM, SamplingParams
from sparkgap.errors import EngineError
from sparkgap.models.batch import ForwardResult
from sparkgap.ops import KVCache
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import PrefillChunk, Sequence

from ..tiny_model import VOCAB_SIZE, write_tiny_model

BLOCK_SIZE = 4


def sequence(sequence_id, prompt, output=(), computed=0, blocks=8, **params):
    made = Sequence(sequence_id, SamplingParams(temperature=0, **params), 0, list(prompt), list(output), computed)
    made.block_table = list(range(sequence_id * blocks, (sequence_id + 1) * blocks))
    return made


class EchoTarget:
    """Hidden states hold the token id and its position; logits say token + 1; NaN after token 13."""

    device = torch.device("cpu")

    def __init__(self):
        self.batches = []
        self.logit_rows = []

    def forward(self, batch, caches, captured_layers=()):
        self.batches.append(batch)
        return ForwardResult(torch.stack((batch.token_ids, batch.attention.positions), -1).float(), None)

    def logits(self, hidden):
        self.logit_rows.append(hidden[:, 0].int().tolist())
        logits = torch.zeros(len(hidden), 32)
        logits[torch.arange(len(hidden)), hidden[:, 0].long() + 1] = 1.0
        logits[hidden[:, 0] == 13] = float("nan")
        return logits


def make_runner():
    empty = torch.zeros(64, BLOCK_SIZE, 1, 2)
    return PlainRunner(EchoTarget(), [KVCache(empty, empty)], Sampler("echo", (0,)))


def test_rows_of_a_batch():
    first, second = sequence(0, range(10, 15), computed=3), sequence(3, [20], [21], computed=1)
    batch = forward_batch(
        [RowSpan(first, 3, [13, 14]), RowSpan(second, 1, [21, 5, 6])], BLOCK_SIZE, torch.device("cpu")
    )
    assert batch.token_ids.tolist() == [13, 14, 21, 5, 6]
    assert batch.attention.positions.tolist() == [3, 4, 1, 2, 3]
    assert batch.slots.tolist() == [3, 4, 97, 98, 99]
    assert batch.attention.row_starts.tolist() == [0, 2, 5]
    assert batch.attention.block_tables.tolist() == [[0, 1], [24, 25]]
    assert (batch.attention.max_rows, batch.attention.max_length) == (3, 5)
    assert batch.attention.row_starts.dtype == batch.attention.block_tables.dtype == torch.int32


def test_logits_only_where_a_token_is_wanted():
    runner = make_runner()
    whole, part, again = sequence(0, [1, 2, 3]), sequence(1, [4, 5, 6]), sequence(2, [7, 8], [9], computed=1)
    outputs = runner.prefill([PrefillChunk(whole, 3), PrefillChunk(part, 2), PrefillChunk(again, 3)])
    assert runner.target.logit_rows == [[3, 9]]
    assert [output and [t.token_id for t in output.tokens] for output in outputs] == [[4], None, [10]]
    assert [s.num_computed_tokens for s in (whole, part, again)] == [3, 2, 3]
    assert whole.output_token_ids == []
    assert runner.prefill([PrefillChunk(part, 3)])[0].tokens[0].token_id == 7
    assert runner.target.batches[-1].token_ids.tolist() == [6]
    runner.target.logit_rows.clear()
    assert runner.prefill([PrefillChunk(sequence(3, [1, 2]), 1)]) == [None]
    assert runner.target.logit_rows == []


def test_decode_is_one_row_a_sequence():
    runner = make_runner()
    sequences = [sequence(i, [1] * (i + 1), [i], computed=i + 1) for i in range(3)]
    outputs = runner.decode(sequences)
    assert [[t.token_id for t in output.tokens] for output in outputs] == [[1], [2], [3]]
    assert runner.target.batches[0].attention.positions.tolist() == [1, 2, 3]
    assert [s.num_computed_tokens for s in sequences] == [2, 3, 4]


def test_logits_that_are_not_numbers_fail_their_sequence():
    outputs = make_runner().decode([sequence(i, [1], [token], computed=1) for i, token in enumerate((12, 13, 14))])
    assert [output.error is None for output in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, EngineError)
    assert outputs[1].tokens == []
    assert "echo" in str(outputs[1].error)


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """One model at ease, and cramped in several ways: small blocks, small chunks, little KV, few sequences."""
    path = str(write_tiny_model(tmp_path_factory.mktemp("tiny")))
    block_4_bytes = 2 * 2 * 4 * 2 * 8 * 4
    common = {"dtype": "float32", "threads": 1, "device": "cpu"}
    return [
        LLM(path, **common),
        LLM(path, block_size=4, max_num_batched_tokens=7, **common),
        LLM(path, block_size=4, kv_cache_memory_bytes=34 * block_4_bytes, max_num_batched_tokens=40, **common),
        LLM(path, block_size=1, max_num_seqs=2, max_num_batched_tokens=1, **common),
    ]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    max_tokens=st.integers(1, 40),
    ignore_eos=st.booleans(),
)
prompt_strategy = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60)


# The examples are fixed: in floating point a token may fall on the border of two with another batch's rounding.
@given(st.lists(st.tuples(prompt_strategy, params_strategy), min_size=2, max_size=7))
@settings(deadline=None, max_examples=12, derandomize=True)
def test_tokens_do_not_depend_on_batch_chunks_or_preemption(llms, requests):
    alone = [llms[0].generate(prompt, params)[0].outputs[0] for prompt, params in requests]
    prompts, params = zip(*requests, strict=True)
    for llm in llms:
        outputs = llm.generate(list(prompts), list(params))
        assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in alone]
        assert [o.outputs[0].text for o in outputs] == [o.text for o in alone]


def test_preemption_leaves_tokens_unchanged(llms):
    prompts = [list(range(start, start + 30)) for start in (0, 50, 100)]
    params = [SamplingParams(max_tokens=90, ignore_eos=True, seed=i, presence_penalty=0.5) for i in range(3)]
    alone = [llms[0].generate(p, s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    outputs = llms[2].generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) >= 2
    assert [output.outputs[0].token_ids for output in outputs] == alone
