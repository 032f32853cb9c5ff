"""What the training loop does not know: how a kind of drafter reads conversations, learns from them and drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkgap.train.batches import DraftVocabulary, MtpRows, Selection, TrainingRows, pack, pack_mtp
from sparkgap.train.config import LossConfig
from sparkgap.train.evaluate import Acceptance, acceptance, accepted_lengths, mtp_lengths
from sparkgap.train.features import Example, Examples
from sparkgap.train.losses import LossWeights, confidence_loss, head_loss
from sparkgap.train.mtp_network import MtpNetwork
from sparkgap.train.network import DraftNetwork


@dataclass(frozen=True)
class Learned:
    """What one part of a step says.

    Attributes:
        total: what is differentiated.
        loss: the share of it that stands for drafted tokens, for reports.
        overlap, correct: of each row, as in `losses.HeadLoss`.
    """

    total: Tensor
    loss: Tensor
    overlap: Tensor
    correct: Tensor


class Recipe(Protocol):
    """A kind of drafter in training. Networks and rows are those of the same recipe."""

    def pack(self, selections: Sequence[Selection], tokens: int, device: torch.device) -> Any:
        """Rows of some conversations' anchors, with their `targets`; `tokens` are drafted after each."""

    def learn(self, network: Any, rows: Any, tokens: int, normalizer: float) -> Learned:
        """Loss of those rows, as a weighted sum divided by `normalizer`."""

    def replay(self, network: Any, chosen: Sequence[Example], tokens: int) -> Acceptance:
        """Acceptance in greedy rounds over answers that the target gave greedily."""


class BlockRecipe:
    """DSpark and DFlash.

    Args:
        examples: where the features are.
        vocabulary: draft vocabulary.
        loss: weights of the loss.
        lead_rows: rows of a block before those that predict.
    """

    def __init__(self, examples: Examples, vocabulary: DraftVocabulary, loss: LossConfig, lead_rows: int) -> None:
        self.examples, self.vocabulary, self.loss, self.lead_rows = examples, vocabulary, loss, lead_rows

    def pack(self, selections: Sequence[Selection], tokens: int, device: torch.device) -> TrainingRows:
        """See `Recipe.pack`."""
        return pack(selections, self.examples, self.vocabulary, tokens, self.lead_rows, self.loss.gamma, device)

    def learn(self, network: DraftNetwork, rows: TrainingRows, tokens: int, normalizer: float) -> Learned:
        """See `Recipe.learn`."""
        hidden = network(rows.batch)
        markov = network.markov_states(rows.previous_tokens)
        latents = network.markov_latents(hidden, markov, tokens)
        weights = LossWeights(self.loss.cross_entropy, self.loss.total_variation)
        result = head_loss(hidden, latents, network.markov_output(), network.head, rows.targets, weights, normalizer)
        total = result.loss
        if network.shape.markov_rank and self.loss.confidence:
            logits = network.confidence_logits(hidden, markov)
            total = total + self.loss.confidence * confidence_loss(
                logits, result.overlap, rows.targets.weights, normalizer
            )
        return Learned(total, result.loss, result.overlap, result.correct)

    @torch.inference_mode()
    def replay(self, network: DraftNetwork, chosen: Sequence[Example], tokens: int) -> Acceptance:
        """See `Recipe.replay`."""
        device = network.head.device
        ids = self.vocabulary.ids.to(device)
        return acceptance(
            [accepted_lengths(network, e, self.examples.taps(e).to(device), ids, tokens).tolist() for e in chosen],
            tokens,
        )


class MtpRecipe:
    """Multi-token prediction.

    Args:
        examples: where the features are.
        vocabulary: draft vocabulary.
        loss: weights of the loss; there is no confidence.
    """

    def __init__(self, examples: Examples, vocabulary: DraftVocabulary, loss: LossConfig) -> None:
        self.examples, self.vocabulary, self.loss = examples, vocabulary, loss

    def pack(self, selections: Sequence[Selection], tokens: int, device: torch.device) -> MtpRows:
        """See `Recipe.pack`."""
        return pack_mtp(selections, self.examples, self.vocabulary, tokens, self.loss.gamma, device)

    def learn(self, network: MtpNetwork, rows: MtpRows, tokens: int, normalizer: float) -> Learned:
        """See `Recipe.learn`."""
        hidden = network(rows.batch)
        none = hidden[:, :0]
        weights = LossWeights(self.loss.cross_entropy, self.loss.total_variation)
        result = head_loss(hidden, none, network.head[:, :0], network.head, rows.targets, weights, normalizer)
        return Learned(result.loss, result.loss, result.overlap, result.correct)

    @torch.inference_mode()
    def replay(self, network: MtpNetwork, chosen: Sequence[Example], tokens: int) -> Acceptance:
        """See `Recipe.replay`."""
        device = network.head.device
        lengths = [
            mtp_lengths(network, e.token_ids.to(device), e.answer_start, self.examples.taps(e).to(device), tokens)
            for e in chosen
        ]
        return acceptance([each.tolist() for each in lengths], tokens)
