"""The three stages in one directory: conversations, training, evaluation.

Everything is kept, so that running the same command again continues where it stopped.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkgap.catalog.checkpoint import Checkpoint, open_checkpoint
from sparkgap.catalog.drafters import DrafterCheckpoint, open_drafter, write_speculators_config
from sparkgap.catalog.identity import TargetIdentity, identify_target
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import load_target
from sparkgap.ops import NativeKernels
from sparkgap.train.batches import DraftVocabulary, draft_vocabulary, normed_tap_scale, tap_scale, token_counts
from sparkgap.train.building import build_mtp_network, build_network, head_rows, mask_token
from sparkgap.train.config import TrainConfig
from sparkgap.train.conversations import check_room, collect, read_prompts
from sparkgap.train.evaluation_stage import evaluate
from sparkgap.train.export import drafter_settings, export
from sparkgap.train.features import Example, Examples, layer_columns
from sparkgap.train.generation import LaneKernels
from sparkgap.train.kept import read_kept_tensors, write_kept_json
from sparkgap.train.loop import Trainer
from sparkgap.train.memory import check_memory, keep_freed_memory
from sparkgap.train.mtp_network import MtpNetwork
from sparkgap.train.network import DraftNetwork
from sparkgap.train.progress import Progress
from sparkgap.train.recipes import BlockRecipe, MtpRecipe, Recipe
from sparkgap.train.recorded import check_settings, plain, settings_to_record, with_absolute_paths
from sparkgap.train.shared import TARGET_FILE, SharedConversations, open_shared, shared_shards
from sparkgap.train.start import start
from sparkgap.train.start_from import check_sizes, copy_weights
from sparkgap.train.template import TurnTemplate, turn_template

_SCALED_CONVERSATIONS = 64
"""Conversations whose captured states set the scale of each dimension."""

_BEGIN_AGAIN = "remove it and state.pt beside it, and training begins again"


def train(config: TrainConfig, progress: Progress) -> dict[str, Any]:
    """Make a drafter; returns the report, which is also written.

    Raises:
        SparkgapError: bad input, or memory or disk that will not do.
    """
    given, config = config, with_absolute_paths(config)
    work, asked = config.out / "work", settings_to_record(config)
    shared = _shared(config)
    check_settings(work / "settings.json", asked, given)
    if shared is not None:
        config = dataclasses.replace(config, conversation=shared.sampling)
    if config.evaluation_prompts is not None:
        read_prompts(config.evaluation_prompts)
    initial = None if config.start_from is None else open_drafter(str(config.start_from))
    keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    workers = config.workers or (torch.get_num_threads() if device.type == "cpu" else 1)
    started = time.monotonic()
    checkpoint, target = _open_target(config, device, progress)
    identity = identify_target(checkpoint.config, checkpoint.weights)
    template = turn_template(checkpoint)
    check_room(template, config.conversation)
    layer_ids = config.drafter_layer_ids(target.config.num_layers)
    if initial is not None:
        check_sizes(initial, config, target.config)
    work.mkdir(parents=True, exist_ok=True)
    write_kept_json(work / "settings.json", asked)
    examples = _conversations(config, shared, target, identity, workers, template, checkpoint.tokenizer, progress)
    sampled = time.monotonic()
    held_out, learned = _split(examples, config.optimization.held_out_conversations)
    progress.log(
        f"{len(examples.items)} conversations with {examples.answer_tokens} answer tokens, {len(held_out)} held out"
    )
    vocabulary, markov_rows = _vocabulary(work / "vocabulary.safetensors", learned, target, config)
    network, recipe = _network(config, checkpoint, target, template, examples, learned, vocabulary, markov_rows)
    progress.log(
        f"drafter of {sum(p.numel() for p in network.parameters()) / 1e6:.1f} M trained parameters, "
        f"{vocabulary.ids.shape[0]} draft tokens cover {vocabulary.coverage:.2%} of the answers"
    )
    tokens = config.network.num_speculative_tokens
    trainer = Trainer(
        network, recipe, learned, held_out, tokens, config.optimization, config.seed, workers, work, progress
    )
    _set_weights(trainer, network, initial, examples, vocabulary)
    trainer.run()
    trained = time.monotonic()
    method = config.network.method
    settings = drafter_settings(network, method, target.config, layer_ids, tokens, identity)
    architectures = [target.config.architecture]
    trained_network = trainer.inference_network()
    size = export(config.out, trained_network, vocabulary, settings, checkpoint.name, architectures)
    report: dict[str, Any] = {
        "settings": plain(config),
        "target": {"name": checkpoint.name, "architecture": target.config.architecture},
        "conversations": len(examples.items),
        "answer_tokens": examples.answer_tokens,
        "held_out_conversations": len(held_out),
        "draft_vocabulary_coverage": vocabulary.coverage,
        "target_layer_ids": list(layer_ids),
        "checkpoint_bytes": size,
        "steps": trainer.step,
        "anchors": trainer.anchors,
        "seconds": {
            "conversations_this_run": round(sampled - started, 1),
            "training": round(trainer.seconds, 1),
            "training_this_run": round(trained - sampled, 1),
        },
        "curve": trainer.history,
    }
    report |= evaluate(config, target, checkpoint.tokenizer, template, examples, held_out, progress)
    if (calibration := report["confidence_calibration"]) is not None:
        scaling = tuple(zip(calibration["temperatures"], calibration["offsets"], strict=True))
        write_speculators_config(
            config.out,
            dataclasses.replace(settings, confidence_scaling=scaling),
            verifier=checkpoint.name,
            verifier_architectures=architectures,
        )
    write_kept_json(config.out / "report.json", report)
    progress.log(f"drafter and report.json are in {config.out}")
    return report


def _network(
    config: TrainConfig,
    checkpoint: Checkpoint,
    target: Decoder,
    template: TurnTemplate,
    examples: Examples,
    learned: list[Example],
    vocabulary: DraftVocabulary,
    markov_rows: Tensor,
) -> tuple[DraftNetwork | MtpNetwork, Recipe]:
    """The untrained network, and how it learns."""
    head = head_rows(checkpoint, target, vocabulary.ids)
    scale_file = config.out / "work" / "tap-scale.safetensors"
    if config.network.method == "mtp":
        scale_of = partial(normed_tap_scale, eps=target.config.rms_norm_eps)
        scale = _kept_scale(scale_file, examples, learned, scale_of)
        module = build_mtp_network(config, target, head, vocabulary, scale)
        return module, MtpRecipe(examples, vocabulary, config.loss)
    scale = _kept_scale(scale_file, examples, learned, tap_scale)
    mask = mask_token(checkpoint, template, vocabulary)
    network = build_network(config, target, head, vocabulary, scale, markov_rows, mask)
    return network, BlockRecipe(examples, vocabulary, config.loss, network.shape.lead_rows)


def _set_weights(
    trainer: Trainer,
    network: DraftNetwork | MtpNetwork,
    initial: DrafterCheckpoint | None,
    examples: Examples,
    vocabulary: DraftVocabulary,
) -> None:
    """What training goes on from: the run's last state, another drafter, or the usual start."""
    if trainer.load():
        trainer.progress.log(f"continuing after step {trainer.step}")
    elif initial is not None:
        copy_weights(initial, network, vocabulary)
        trainer.progress.log(f"starting from the weights of {initial.name}")
    elif isinstance(network, DraftNetwork):
        start(network, examples, list(trainer.train_examples), trainer.seed)


def _device(name: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not available here: {str(error).splitlines()[0]}") from error
    return device


def _open_target(config: TrainConfig, device: torch.device, progress: Progress) -> tuple[Checkpoint, Decoder]:
    """The target as it is served: W8A8 on a CPU, else bfloat16 with kernels for many conversations at a time."""
    checkpoint = open_checkpoint(config.target)
    target = load_target(
        checkpoint.config,
        checkpoint.weights,
        kernels=NativeKernels(torch.get_num_threads(), "w8a8") if device.type == "cpu" else LaneKernels(),
        dtype=torch.bfloat16,
        device=device,
        max_model_len=config.conversation.max_positions,
    )
    progress.log(f"target {checkpoint.name}: {target.config.num_layers} layers of {target.config.hidden_size}")
    return checkpoint, target


def _shared(config: TrainConfig) -> SharedConversations | None:
    """The other run's conversations, where they are asked for; checked before anything of this run is written."""
    if config.conversations is None:
        return None
    checkpoint = open_checkpoint(config.target)
    identity = identify_target(checkpoint.config, checkpoint.weights)
    return open_shared(config, identity.num_layers, identity)


def _conversations(
    config: TrainConfig,
    shared: SharedConversations | None,
    target: Decoder,
    identity: TargetIdentity,
    workers: int,
    template: TurnTemplate,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Examples:
    """Stage 1, or another run's conversations, with the states of the drafter's layers."""
    model, work = target.config, config.out / "work"
    wanted, captured = config.drafter_layer_ids(model.num_layers), config.captured_layer_ids(model.num_layers)
    if shared is not None:
        paths = shared_shards(shared, work / "shared.json")
        progress.log(f"{len(paths)} files of conversations from {shared.run}")
        return Examples(paths, layer_columns(shared.layer_ids, wanted, model.hidden_size))
    check_memory(model, config.conversation, workers, target.device)
    write_kept_json(work / TARGET_FILE, identity.to_json())
    sampling, top_k = config.conversation, config.features.top_k
    examples = Examples(columns=layer_columns(captured, wanted, model.hidden_size))
    collect(
        work / "conversations",
        target,
        workers,
        template,
        tokenizer,
        sampling,
        captured,
        top_k,
        config.seed,
        progress,
        examples,
    )
    return examples


def _split(examples: Examples, held_out: int) -> tuple[list[Example], list[Example]]:
    """The first greedy conversations to measure on, and the others to learn from.

    Raises:
        ConfigError: too few conversations to do both.
    """
    greedy = [e for e in examples.items if e.temperature == 0 and e.answer_tokens > 1][:held_out]
    watched = {id(e) for e in greedy}
    learned = [e for e in examples.items if id(e) not in watched and e.answer_tokens > 1]
    if not greedy or not learned:
        raise ConfigError(
            f"{len(examples.items)} conversations are too few to learn from some and hold out {held_out} greedy "
            "ones; raise --answer-tokens, or let some answers have temperature 0"
        )
    return greedy, learned


def _vocabulary(
    path: Path, learned: list[Example], target: Decoder, config: TrainConfig
) -> tuple[DraftVocabulary, Tensor]:
    """The draft vocabulary and the trained rows of W1, chosen once a run: they are part of the network's shape."""
    counts = token_counts(learned, target.config.vocab_size)
    if not path.exists():
        ids = draft_vocabulary(counts, config.network.draft_vocab_size).ids
        unfinished = path.with_suffix(".partial")
        save_file({"ids": ids, "markov_tokens": counts.nonzero()[:, 0]}, unfinished)
        os.replace(unfinished, path)
    saved = read_kept_tensors(path, ("ids", "markov_tokens"), _BEGIN_AGAIN)
    rows = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    rows[saved["markov_tokens"]] = torch.arange(1, saved["markov_tokens"].shape[0] + 1)
    chosen = torch.zeros_like(counts)
    chosen[saved["ids"]] = 1
    inside = draft_vocabulary(chosen, saved["ids"].shape[0])
    coverage = float(counts[saved["ids"]].sum() / counts.sum().clamp_min(1))
    return dataclasses.replace(inside, coverage=coverage), rows


def _kept_scale(path: Path, examples: Examples, learned: list[Example], scale: Callable[[Tensor], Tensor]) -> Tensor:
    """`scale` of the captured states of a sample of what is learned, chosen once a run."""
    if not path.exists():
        unfinished = path.with_suffix(".partial")
        taps = torch.cat([examples.taps(e) for e in learned[:_SCALED_CONVERSATIONS]])
        save_file({"tap_scale": scale(taps)}, unfinished)
        os.replace(unfinished, path)
    return read_kept_tensors(path, ("tap_scale",), _BEGIN_AGAIN)["tap_scale"]
