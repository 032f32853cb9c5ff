"""`sparkgap train`: make a drafter for any supported model, with no data set."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from sparkgap.cli.console import print_json, use_utf8_output
from sparkgap.config import DEFAULT_MODEL
from sparkgap.errors import ConfigError
from sparkgap.train.config import (
    HEAD_TYPES,
    METHODS,
    ConversationConfig,
    FeatureConfig,
    LossConfig,
    NetworkConfig,
    OptimizationConfig,
    TrainConfig,
)

_CONVERSATIONS, _DRAFTER, _TRAINING = "Stage 1: conversations", "Drafter", "Stage 2: training"


def _option(panel: str | None, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def parse_numbers(text: str, name: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Comma-separated numbers.

    Raises:
        ConfigError: not numbers of this kind.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas between them, got {text!r}") from None


def train(
    out: Annotated[Path, _option(None, "--out", "-o", help="Directory of the drafter; continues what is there.")],
    target: Annotated[
        str, _option(None, "--target", "-t", help="Catalog name, model directory, .gguf file or hf:owner/name.")
    ] = DEFAULT_MODEL,
    method: Annotated[str, _option(_DRAFTER, "--method", help=f"One of {', '.join(METHODS)}.")] = "dspark",
    layers: Annotated[int | None, _option(_DRAFTER, help="Draft layers; default: 2 for blocks, and mtp has 1.")] = None,
    num_speculative_tokens: Annotated[
        int | None, _option(_DRAFTER, help="Tokens drafted in a round; default: 7 for blocks, 3 for mtp.")
    ] = None,
    draft_vocab_size: Annotated[
        int, _option(_DRAFTER, help="Tokens that can be drafted: the most frequent ones.")
    ] = NetworkConfig.draft_vocab_size,
    markov_rank: Annotated[
        int | None,
        _option(_DRAFTER, help=f"Rank of dspark's Markov head; default: {NetworkConfig.markov_rank}."),
    ] = None,
    head: Annotated[
        str | None,
        _option(
            _DRAFTER,
            "--head",
            help=f"Kind of dspark's Markov head: {', '.join(HEAD_TYPES)}; default: {NetworkConfig.markov_head_type}.",
        ),
    ] = None,
    kv_heads: Annotated[int | None, _option(_DRAFTER, help="Key and value heads; default: the target's.")] = None,
    target_layers: Annotated[
        str | None,
        _option(_DRAFTER, help="Target layers to read, such as 4,12,20,28 (mtp: one); default: by its depth."),
    ] = None,
    conversations: Annotated[
        Path | None,
        _option(
            _CONVERSATIONS,
            help="Directory of another run whose conversations are used instead of sampling own ones; it is only read.",
        ),
    ] = None,
    answer_tokens: Annotated[
        int, _option(_CONVERSATIONS, help="Answer tokens to sample, or to use of --conversations (default there: all).")
    ] = ConversationConfig.answer_tokens,
    prompts: Annotated[
        Path | None, _option(_CONVERSATIONS, help="User turns to add: .jsonl with `prompt`, or one a line.")
    ] = None,
    only_prompts: Annotated[
        bool, _option(_CONVERSATIONS, "--only-prompts", help="Use the turns of --prompts alone.")
    ] = False,
    answer_temperatures: Annotated[
        str, _option(_CONVERSATIONS, help="Temperatures of answers, drawn evenly.")
    ] = "0,0,0,0.7",
    opener_share: Annotated[
        float, _option(_CONVERSATIONS, help="Share of the user turns whose first words are given to the target.")
    ] = ConversationConfig.opener_share,
    lanes: Annotated[int, _option(_CONVERSATIONS, help="Conversations decoded together.")] = ConversationConfig.lanes,
    max_positions: Annotated[
        int, _option(_CONVERSATIONS, help="Longest conversation in tokens.")
    ] = ConversationConfig.max_positions,
    steps: Annotated[int, _option(_TRAINING, help="Optimizer steps.")] = OptimizationConfig.steps,
    anchors_per_step: Annotated[
        int, _option(_TRAINING, help="Blocks that a step learns from.")
    ] = OptimizationConfig.anchors_per_step,
    short_share: Annotated[
        float, _option(_TRAINING, help="Share of the steps, at the start, with short blocks.")
    ] = OptimizationConfig.short_share,
    loss_weights: Annotated[
        str, _option(_TRAINING, help="Weights of cross-entropy, total variation and confidence.")
    ] = "0.1,0.9,1",
    gamma: Annotated[float, _option(_TRAINING, help="Decay of the weights along a block.")] = LossConfig.gamma,
    matrix_learning_rate: Annotated[
        float, _option(_TRAINING, help="Learning rate of Muon, for the layers' matrices.")
    ] = OptimizationConfig.matrix_learning_rate,
    learning_rate: Annotated[
        float, _option(_TRAINING, help="Learning rate of AdamW, for norms and heads.")
    ] = OptimizationConfig.learning_rate,
    evaluation_prompts: Annotated[
        Path | None, _option(None, help="User turns to measure on at the end; never trained on.")
    ] = None,
    start_from: Annotated[
        Path | None,
        _option(_TRAINING, help="Drafter to start from: one of the same sizes; its draft vocabulary may be another."),
    ] = None,
    device: Annotated[str, _option(None, help="auto, cpu, or an accelerator such as cuda.")] = "auto",
    threads: Annotated[int | None, _option(None, help="Compute threads; default: torch's choice.")] = None,
    workers: Annotated[
        int | None, _option(None, help="Parts that run side by side; default: one for each thread on a CPU.")
    ] = None,
    seed: Annotated[int, _option(None, help="Source of all random numbers.")] = 0,
    as_json: Annotated[bool, _option(None, "--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Train a drafter for a target model on conversations that the target makes itself."""
    use_utf8_output()
    weights = parse_numbers(loss_weights, "loss-weights", float)
    if len(weights) != 3:
        raise ConfigError(f"loss-weights must be three numbers, got {loss_weights!r}")
    usual = NetworkConfig.for_method(method.lower())
    for name, value in (("markov-rank", markov_rank), ("head", head)):
        if value is not None and usual.method != "dspark":
            raise ConfigError(
                f"{name} is of dspark drafters, and a drafter of method {usual.method} has no Markov head"
            )
    config = TrainConfig(
        target=target,
        out=out,
        device=device,
        threads=threads,
        workers=workers,
        seed=seed,
        evaluation_prompts=evaluation_prompts,
        conversations=conversations,
        start_from=start_from,
        conversation=ConversationConfig(
            answer_tokens=answer_tokens,
            lanes=lanes,
            max_positions=max_positions,
            answer_temperatures=parse_numbers(answer_temperatures, "answer-temperatures", float),
            opener_share=opener_share,
            prompts=prompts,
            only_prompts=only_prompts,
        ),
        features=FeatureConfig(None if target_layers is None else parse_numbers(target_layers, "target-layers", int)),
        network=NetworkConfig(
            method=method.lower(),  # type: ignore[arg-type]
            num_layers=usual.num_layers if layers is None else layers,
            num_speculative_tokens=(
                usual.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
            ),
            draft_vocab_size=draft_vocab_size,
            markov_rank=usual.markov_rank if markov_rank is None else markov_rank,
            num_kv_heads=kv_heads,
            markov_head_type=usual.markov_head_type if head is None else head.lower(),  # type: ignore[arg-type]
        ),
        loss=LossConfig(*weights, gamma=gamma),
        optimization=OptimizationConfig(
            steps=steps,
            anchors_per_step=anchors_per_step,
            short_share=short_share,
            matrix_learning_rate=matrix_learning_rate,
            learning_rate=learning_rate,
        ),
    )
    from rich.console import Console

    from sparkgap.train.progress import Progress
    from sparkgap.train.run import train as run

    with _hold(out):
        progress = Progress(Console(stderr=True), out / "train.log")
        try:
            report = run(config, progress)
        except KeyboardInterrupt:
            progress.log("interrupted; the same command goes on from the last conversations or step that were kept")
            raise
    if as_json:
        print_json(report)


@contextmanager
def _hold(out: Path) -> Iterator[None]:
    """Make the directory of a run, and keep other processes out of it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another process trains in {out}; wait for it, or give another --out") from None
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()
