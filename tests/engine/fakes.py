"""A runner and a tokenizer small enough to see through."""

from sparkgap.config import EngineConfig, SamplingParams
from sparkgap.engine.engine import Engine
from sparkgap.engine.intake import ModelLimits
from sparkgap.rounds.sequence import RoundOutput, SampledToken, TokenLogprobs

VOCAB = 32
EOS = 31


class LetterTokenizer:
    """Tokens 0 ... 25 are letters, 26 is a space, 31 is special."""

    special_token_ids = frozenset({EOS})

    def encode(self, text, add_special_tokens=True):
        return [26 if letter == " " else ord(letter) - ord("a") for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        names = {26: " ", EOS: "<eos>"}
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_token_ids)]
        return "".join(names.get(i) or (chr(ord("a") + i) if i < 26 else f"<{i}>") for i in kept)


def next_token(tokens):
    """What the fake model says after `tokens`: any token but the end of sequence."""
    state = len(tokens)
    for token in tokens[-6:]:
        state = (state * 33 + token * 7 + 5) % 10_007
    return state % (VOCAB - 1)


class FakeRunner:
    """Computes nothing, but keeps a KV cache of token ids, and checks that each sequence finds its own in it.

    An entry stands for its token and all before it, as KV does. Where drafts are rejected lies garbage.

    Args:
        script: tokens by number of output tokens, for every sequence; None lets `next_token` decide.
        draft: draft tokens a round; all but the last few are accepted, in turn.
    """

    def __init__(self, block_size, script=None, draft=0, fail=None):
        self.block_size = block_size
        self.script = script
        self.draft = draft
        self.fail = fail
        self.num_lookahead_tokens = draft + 1
        self.cache = {}
        self.released = []
        self.log = []
        self._round = 0

    def prefill(self, chunks):
        assert chunks
        self.log.append(("prefill", [(c.sequence.sequence_id, c.end - c.sequence.num_computed_tokens) for c in chunks]))
        outputs = []
        for sequence, end in chunks:
            assert sequence.num_computed_tokens < end <= sequence.num_tokens
            self._write(sequence, sequence.token_ids(0, end), sequence.num_computed_tokens)
            self._may_fail("prefill", sequence)
            sequence.num_computed_tokens = end
            done = end == sequence.num_tokens
            outputs.append(RoundOutput(self._tokens(sequence, 1)) if done else None)
        return outputs

    def decode(self, sequences):
        assert sequences
        self.log.append(("decode", [s.sequence_id for s in sequences]))
        self._round += 1
        outputs = []
        for sequence in sequences:
            assert sequence.num_computed_tokens == sequence.num_tokens - 1
            accepted = self._round % (self.draft + 1)
            tokens = self._tokens(sequence, accepted + 1)
            known = sequence.token_ids(0, sequence.num_tokens) + [t.token_id for t in tokens[:-1]]
            self._write(sequence, known, sequence.num_computed_tokens)
            self._reject(sequence, len(known), len(known) + self.draft - accepted)
            self._may_fail("decode", sequence)
            sequence.num_computed_tokens += accepted + 1
            reason = None if accepted or not self.draft else "unlucky"
            outputs.append(RoundOutput(tokens, self.draft, accepted, reason))
        return outputs

    def release(self, sequence):
        self.released.append(sequence.sequence_id)

    def _may_fail(self, kind, sequence):
        if self.fail is not None:
            self.fail(kind, sequence)

    def _tokens(self, sequence, number):
        tokens = sequence.token_ids(0, sequence.num_tokens)
        new = []
        for _ in range(number):
            index = len(tokens) - len(sequence.prompt_token_ids)
            tokens.append(next_token(tokens) if self.script is None else self.script[index % len(self.script)])
            wanted = sequence.params.logprobs
            logprobs = None if wanted is None else TokenLogprobs(-0.5, 2, [(0, -0.1), (1, -0.9)][:wanted])
            new.append(SampledToken(tokens[-1], logprobs))
        return new

    def _write(self, sequence, tokens, start):
        for position in range(len(tokens)):
            slot = self._slot(sequence, position)
            if slot is None:
                # Only what lies beyond max_model_len may have no block; the engine drops those tokens.
                break
            entry = tuple(tokens[: position + 1])
            if position >= start:
                self.cache[slot] = entry
            assert self.cache[slot] == entry

    def _reject(self, sequence, start, end):
        for position in range(start, end):
            slot = self._slot(sequence, position)
            if slot is not None:
                self.cache[slot] = "rejected"

    def _slot(self, sequence, position):
        table = sequence.block_table
        if position // self.block_size >= len(table):
            return None
        return table[position // self.block_size] * self.block_size + position % self.block_size


def make_engine(
    *,
    blocks=64,
    block_size=4,
    max_model_len=64,
    script=None,
    draft=0,
    fail=None,
    eos=(EOS,),
    reads_ahead=False,
    **settings,
):
    config = EngineConfig(model="fake", block_size=block_size, **settings)
    runner = FakeRunner(block_size, script, draft, fail)
    limits = ModelLimits("fake", VOCAB, tuple(eos), max_model_len)
    return Engine(runner, LetterTokenizer(), limits, config, blocks, reads_ahead=reads_ahead)


def run(engine, max_steps=5_000):
    """Step until nothing is left; outputs by request."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_unfinished_requests()
    assert_idle(engine)
    return outputs


def assert_idle(engine):
    """Nothing is held for any request."""
    scheduler = engine.scheduler
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    assert engine.stats.num_used_blocks == engine.stats.num_requests == engine.stats.num_queued_requests == 0
    assert not engine._prefixes._chains
    assert not engine._deadlines
    assert not engine._owners
    assert not engine._requests


def generate(engine, prompt, params=None, **changes):
    """The only completion of one request."""
    params = params or SamplingParams(**changes)
    request_id = engine.add_request(prompt, params, output_kind="final")
    (output,) = run(engine)[request_id]
    return output
