"""The start of training already repeats what stands in the context."""

import pytest
import torch

from sparkgap.train.batches import tap_scale
from sparkgap.train.evaluate import accepted_lengths
from sparkgap.train.features import Example
from sparkgap.train.network import DraftNetwork, NetworkShape
from sparkgap.train.start import start

VOCAB, HIDDEN = 90, 96


class Repetitions:
    """Conversations that repeat a random phrase, with captured states that hold each token and the next."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.mixing = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator))[0]
        self.items = []
        for _ in range(count):
            phrase = torch.randperm(VOCAB, generator=generator)[:30]
            self.items.append(Example(phrase.repeat(3), 30, 0.0, 0, 0))

    def taps(self, example: Example) -> torch.Tensor:
        here, following = example.token_ids[:-1], example.token_ids[1:]
        before = example.token_ids.roll(1)[:-1]
        first = self.embedding[here] + 0.3 * self.embedding[before] @ self.mixing.T
        return torch.cat([0.01 * first, 50 * self.embedding[following] @ self.mixing], dim=1)


def network(examples: Repetitions, kv_heads: int, layers: int) -> DraftNetwork:
    shape = NetworkShape(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=32, num_layers=layers, num_heads=4,
        num_kv_heads=kv_heads, head_dim=24, num_taps=2, vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=4,
        markov_tokens=VOCAB, lead_rows=0, rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    scale = tap_scale(torch.cat([examples.taps(e) for e in examples.items]))
    return DraftNetwork(shape, examples.embedding, examples.embedding, 0, scale, torch.arange(VOCAB), torch.float32)


def first_tokens_right(drafter: DraftNetwork, examples: Repetitions) -> float:
    lengths = [accepted_lengths(drafter, e, examples.taps(e), torch.arange(VOCAB), 1) for e in examples.items[-8:]]
    return float((torch.cat(lengths) > 0).float().mean())


@pytest.mark.parametrize(("kv_heads", "layers"), [(4, 2), (2, 1), (2, 3)])
def test_a_started_network_repeats_its_context(kv_heads, layers):
    examples = Repetitions(60)
    drafter = network(examples, kv_heads, layers)
    with torch.no_grad():
        assert first_tokens_right(drafter, examples) < 0.1
        start(drafter, examples, examples.items[:-8], seed=1)  # type: ignore[arg-type]
        assert first_tokens_right(drafter, examples) > 0.35


def test_the_same_seed_gives_the_same_start():
    examples = Repetitions(20)
    first, second, other = (network(examples, 2, 2) for _ in range(3))
    for drafter, seed in ((first, 1), (second, 1), (other, 2)):
        start(drafter, examples, examples.items, seed)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.layers[0].self_attn.k_proj.weight, other.layers[0].self_attn.k_proj.weight)
