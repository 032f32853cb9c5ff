"""Stage 2: the training loop, resumable at any point."""

import copy
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from sparkgap.train.batches import Selection, select
from sparkgap.train.config import OptimizationConfig
from sparkgap.train.features import Example
from sparkgap.train.kept import damaged
from sparkgap.train.network import TrainableNetwork
from sparkgap.train.progress import Progress
from sparkgap.train.recipes import Recipe


@dataclass(frozen=True)
class StepResult:
    """Means over a step's first drafted tokens, and its loss."""

    loss: float
    first_correct: float
    first_overlap: float
    anchors: int


def split_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters for Muon (matrices between hidden states) and for AdamW (norms and heads)."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        hidden = parameter.ndim == 2 and name.startswith(("layers.", "fc.", "eh_proj."))
        (matrices if hidden else others).append(parameter)
    return matrices, others


class Trainer:
    """Trains a network on examples.

    Args:
        network: float32 master weights; its `dtype` is the compute type.
        recipe: how this kind of network learns.
        train: conversations to learn from.
        held_out: greedy ones to watch.
        tokens: tokens drafted after an anchor (N).
        config: how to train.
        seed: of the order of conversations and of their anchors.
        workers: threads that share a step; each runs its part of the conversations on one core.
        directory: of the checkpoint.
        progress: where to report.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        recipe: Recipe,
        train: Sequence[Example],
        held_out: Sequence[Example],
        tokens: int,
        config: OptimizationConfig,
        seed: int,
        workers: int,
        directory: Path,
        progress: Progress,
    ) -> None:
        self.network, self.recipe, self.train_examples, self.held_out = network, recipe, train, held_out
        self.tokens, self.config, self.seed = tokens, config, seed
        self.directory, self.progress = directory, progress
        matrices, others = split_parameters(network)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.matrix_learning_rate, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._replicas = [_replica(network) for _ in range(workers)]
        self.step = self.epoch = self.epoch_step = self.anchors = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []

    @property
    def checkpoint_path(self) -> Path:
        """File of the state."""
        return self.directory / "state.pt"

    def save(self) -> None:
        """Write the whole state; the file is always complete."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": (self.step, self.epoch, self.epoch_step, self.anchors, self.seconds),
            "history": self.history,
        }
        partial = self.checkpoint_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint_path)

    def load(self) -> bool:
        """Continue from the last state, if there is one.

        Raises:
            ConfigError: its file is damaged.
        """
        path = self.checkpoint_path
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.network.head.device, weights_only=True)
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.epoch, self.epoch_step, self.anchors, self.seconds = state["counters"]
            self.history = state["history"]
        except (OSError, RuntimeError, UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
            what = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise damaged(path, what, "remove it, and training begins again") from error
        return True

    def run(self) -> None:
        """Train to the last step, saving now and then and at the end."""
        config = self.config
        started = saved = time.monotonic()
        recent: list[StepResult] = []
        with (
            self.progress.task("training", config.steps, "steps") as bar,
            ThreadPoolExecutor(
                len(self._replicas), "trainer", initializer=_one_thread_each(len(self._replicas))
            ) as pool,
        ):
            bar.start_from(self.step)
            while self.step < config.steps:
                steps = select(
                    self.train_examples,
                    f"{self.seed}/{self.epoch}",
                    config.anchors_per_step,
                    config.anchors_per_conversation,
                )
                for selections in steps[self.epoch_step :]:
                    recent.append(self._step(selections, pool))
                    self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
                    self.anchors += recent[-1].anchors
                    bar.advance(1, f"loss {recent[-1].loss:.3f}, first token {recent[-1].first_correct:.2f}")
                    now = time.monotonic()
                    self.seconds, started = self.seconds + now - started, now
                    if self.step % config.evaluation_interval == 0 or self.step == config.steps:
                        self._watch(recent)
                        recent, started = [], time.monotonic()
                    if now - saved >= config.checkpoint_interval_s:
                        self.save()
                        saved = started = time.monotonic()
                    if self.step >= config.steps:
                        break
                else:
                    self.epoch, self.epoch_step = self.epoch + 1, 0
        self.save()

    def _step(self, selections: list[Selection], pool: ThreadPoolExecutor) -> StepResult:
        """One optimizer step."""
        factor = self.config.learning_rate_factor(self.step)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        tokens = self.config.tokens_at(self.step, self.tokens)
        parts = _divide(selections, len(self._replicas))
        rows = [self.recipe.pack(part, tokens, self.network.head.device) for part in parts]
        normalizer = float(sum(part.targets.weights.sum() for part in rows))
        jobs = [
            pool.submit(self._backward, replica, part, tokens, normalizer)
            for replica, part in zip(self._replicas, rows, strict=False)
        ]
        results = [job.result() for job in jobs]
        used = self._replicas[: len(rows)]
        for master, *copies in zip(self.network.parameters(), *(r.parameters() for r in used), strict=True):
            gradients = [c.grad.float() for c in copies if c.grad is not None]
            master.grad = torch.stack(gradients).sum(0) if len(gradients) > 1 else (gradients or [None])[0]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        anchors = sum(result.anchors for result in results)
        return StepResult(
            sum(result.loss for result in results),
            sum(result.first_correct for result in results) / anchors,
            sum(result.first_overlap for result in results) / anchors,
            anchors,
        )

    def _backward(self, replica: TrainableNetwork, rows: Any, tokens: int, normalizer: float) -> StepResult:
        """Gradients of one part of a step, in the replica; sums over its first tokens."""
        _refresh(replica, self.network)
        result = self.recipe.learn(replica, rows, tokens, normalizer)
        torch.autograd.backward(result.total)
        first_correct = result.correct.view(-1, tokens)[:, 0].sum()
        first_overlap = result.overlap.view(-1, tokens)[:, 0].sum()
        return StepResult(
            float(result.loss.detach()),
            float(first_correct),
            float(first_overlap),
            result.correct.numel() // tokens,
        )

    def _watch(self, recent: Sequence[StepResult]) -> None:
        """Measure acceptance on held-out conversations and remember it."""
        measured = self.recipe.replay(self.inference_network(), self.held_out, self.tokens)
        count = max(len(recent), 1)
        record = {
            "step": self.step,
            "anchors": self.anchors,
            "seconds": round(self.seconds, 1),
            "loss": sum(r.loss for r in recent) / count,
            "train_first_correct": sum(r.first_correct for r in recent) / count,
            "train_first_overlap": sum(r.first_overlap for r in recent) / count,
            "held_out": asdict(measured) | {"accepted_per_round": measured.per_round},
        }
        self.history.append(record)
        positions = " ".join(f"{share:.2f}" for share in measured.by_position)
        self.progress.log(
            f"step {self.step}, {self.anchors} anchors, {self.seconds:.0f} s: loss {record['loss']:.3f}, first "
            f"token {record['train_first_correct']:.3f}; held out: {measured.per_round:.3f} accepted a round, "
            f"first token {measured.first_position:.3f}, by position {positions}"
        )

    def inference_network(self) -> TrainableNetwork:
        """The network in its compute type."""
        _refresh(self._replicas[0], self.network)
        return self._replicas[0]


def _replica(network: TrainableNetwork) -> TrainableNetwork:
    """A copy whose matrices are in the compute type; frozen tables are shared."""
    memo = {id(buffer): buffer for buffer in network.buffers()}
    replica = copy.deepcopy(network, memo)
    for parameter in replica.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(network.dtype)
    return replica


@torch.no_grad()
def _refresh(replica: TrainableNetwork, network: TrainableNetwork) -> None:
    """Copy the master's weights."""
    for own, master in zip(replica.parameters(), network.parameters(), strict=True):
        own.copy_(master)
        own.grad = None


def _divide(selections: list[Selection], parts: int) -> list[list[Selection]]:
    """Split a step's conversations into at most `parts` runs with about as many anchors each."""
    total = sum(len(s.anchors) for s in selections)
    divided: list[list[Selection]] = [[]]
    count = 0
    for selection in selections:
        if divided[-1] and count * parts >= total * len(divided) and len(divided) < parts:
            divided.append([])
        divided[-1].append(selection)
        count += len(selection.anchors)
    return divided


def _one_thread_each(workers: int) -> Any:
    """A thread initializer: cores are divided between workers."""
    threads = max(torch.get_num_threads() // workers, 1)

    def initialize() -> None:
        torch.set_num_threads(threads)

    return initialize
