"""Sampled output has the target's distribution, with every sampling parameter and both draft sampling methods."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from drafter_cases import SETTINGS, TRANSFORMER, checkpoint, random_target, random_tensors
from round_cases import Driver, plain_runner, speculative_runner
from scipy.stats import chisquare
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.models.drafter import Drafter
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Sequence
from sparkgap.rounds.verification import Drafted, exact_match, rejection

VOCAB = 9
PROMPT = [2, 5, 3]
SEEDS = 1000
BATCH = 50
CASES = {
    "temperature": SamplingParams(temperature=1.2),
    "top_k": SamplingParams(temperature=0.9, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.1, min_p=0.15),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "bias": SamplingParams(logit_bias={2: 1.5, 4: -2.0}),
    "all": SamplingParams(
        temperature=0.8, top_k=7, top_p=0.95, min_p=0.02, repetition_penalty=1.2, logit_bias={6: 1.0}, min_tokens=2
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_target() -> object:
    return random_target(4, vocab_size=VOCAB)


def small_drafter(target: object, draft_vocab: int) -> Drafter:
    transformer = TRANSFORMER | {"vocab_size": VOCAB}
    settings = replace(SETTINGS, transformer=transformer, draft_vocab_size=draft_vocab, markov_rank=5)
    tensors = random_tensors(settings, 8)
    return Drafter.from_checkpoint(checkpoint(settings, tensors), target, target.kernels, torch.float32)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 5])
@pytest.mark.parametrize("name", CASES)
def test_joint_distribution_of_two_tokens(name: str, draft_vocab: int, method: str) -> None:
    # All sequences get the same anchor by hand, so that the pair after it has one distribution.
    params = CASES[name]
    target = small_target()
    drafter = small_drafter(target, draft_vocab)
    counts: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for start in range(0, SEEDS, BATCH):
        driver = Driver(speculative_runner(target, drafter, 2, method))
        sequences = [Sequence(i, params, 7919 * (start + i), PROMPT[:-1]) for i in range(BATCH)]
        driver.prefill(sequences)
        for sequence in sequences:
            sequence.output_token_ids = [PROMPT[-1]]
        for output in driver.decode(sequences):
            accepted += output.num_accepted_tokens
        short = [sequence for sequence in sequences if len(sequence.output_token_ids) < 3]
        if short:
            driver.decode(short)
        counts.update((s.output_token_ids[1], s.output_token_ids[2]) for s in sequences)
    expected = expected_probabilities(target, params)
    assert set(counts) <= {pair for pair, probability in expected.items() if probability > 0}
    assert_frequencies(counts, expected)
    assert accepted > 0


def expected_probabilities(target: object, params: SamplingParams) -> dict[tuple[int, int], float]:
    """Joint probability of the two tokens after the anchor, from plain passes over each beginning."""

    def following(tokens: list[int]) -> Tensor:
        runner = plain_runner(target)
        sequence = Sequence(0, params, 0, PROMPT[:-1], [PROMPT[-1], *tokens])
        distributions = []

        class Spy(Sampler):
            def process(self, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
                processed = super().process(logits, rows)
                distributions.append(self.probabilities(processed, rows)[0])
                return processed

        runner.sampler = Spy("tiny", [1])
        Driver(runner).prefill([sequence])
        return distributions[0]

    first = following([])
    pairs = {}
    for a in range(VOCAB):
        if first[a] > 0:
            second = following([a])
            pairs |= {(a, b): float(first[a] * second[b]) for b in range(VOCAB)}
    return pairs


def assert_frequencies(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> None:
    """Chi-square, with cells of fewer than 5 expected observations pooled."""
    total = sum(counts.values())
    large = {pair: p * total for pair, p in expected.items() if p * total >= 5}
    observed = [counts[pair] for pair in large]
    wanted = list(large.values())
    rest = total - sum(observed)
    wanted_rest = total - sum(wanted)
    if wanted_rest >= 5:
        observed.append(rest)
        wanted.append(wanted_rest)
    else:
        scale = sum(observed) / sum(wanted)
        wanted = [value * scale for value in wanted]
    assert len(wanted) > 2
    assert chisquare(observed, wanted).pvalue > 1e-4


def rows_of_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_wrong_drafter_distribution_would_be_noticed() -> None:
    """The test above can fail: drafts from another distribution than the one handed in change the frequencies."""
    params = SamplingParams(temperature=1.0)
    logits = rows_of_logits(2, 1)
    counts: Counter[tuple[int, int]] = Counter()
    lie = torch.full((SEEDS, 1, VOCAB), 1 / VOCAB)
    drafted = [Drafted(Sequence(i, params, i, [1]), (0,)) for i in range(SEEDS)]
    for settlement in rejection(Sampler("tiny", []), logits.repeat(SEEDS, 1), drafted, lie):
        counts[(settlement.tokens[0].token_id, 0)] += 1
    probabilities = logits[0].softmax(-1).tolist()
    with pytest.raises(AssertionError):
        assert_frequencies(counts, {(i, 0): p for i, p in enumerate(probabilities)})


def test_a_token_the_target_never_takes_is_rejected() -> None:
    params = SamplingParams(temperature=1.0, top_k=1)
    logits = rows_of_logits(3, 2)
    best = logits.argmax(-1).tolist()
    wrong = (best[0] + 1) % VOCAB
    drafter = torch.zeros(1, 2, VOCAB)
    drafter[0, 0, wrong] = drafter[0, 1, best[1]] = 1.0
    (settlement,) = rejection(
        Sampler("tiny", []), logits, [Drafted(Sequence(0, params, 5, [1]), (wrong, best[1]))], drafter
    )
    assert [token.token_id for token in settlement.tokens] == [best[0]]
    assert settlement.num_accepted == 0


def test_equal_distributions_are_always_accepted() -> None:
    params = SamplingParams(temperature=1.0)
    logits = rows_of_logits(3, 3)
    drafter = logits[:2].softmax(-1)[None]
    for seed, (a, b) in enumerate(product(range(VOCAB), repeat=2)):
        draft = Drafted(Sequence(0, params, seed, [1]), (a, b))
        (settlement,) = rejection(Sampler("tiny", []), logits, [draft], drafter)
        assert settlement.num_accepted == 2
        assert [token.token_id for token in settlement.tokens[:2]] == [a, b]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["exact", "rejection"])
def test_nan_rows_matter_only_when_they_are_reached(accepted: int, method: str) -> None:
    params = SamplingParams(temperature=0)
    logits = rows_of_logits(4, 6)
    best = logits.argmax(-1).tolist()
    drafts = [token if i < accepted else (token + 1) % VOCAB for i, token in enumerate(best[:3])]
    one_hot = torch.nn.functional.one_hot(torch.tensor(drafts), VOCAB).to(torch.float32)[None]
    for row in range(4):
        broken = logits.clone()
        broken[row, 3] = torch.nan
        draft = Drafted(Sequence(0, params, 0, [1]), tuple(drafts))
        sampler = Sampler("tiny", [])
        if method == "exact":
            (settlement,) = exact_match(sampler, broken, [draft])
        else:
            (settlement,) = rejection(sampler, broken, [draft], one_hot)
        if row <= accepted:
            assert settlement.error is not None
            assert not settlement.tokens
        else:
            assert [token.token_id for token in settlement.tokens] == best[: accepted + 1]
