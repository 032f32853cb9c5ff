"""Stage 3: acceptance measured with the serving drafter on the written checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sparkgap.catalog.drafters import read_drafter
from sparkgap.catalog.json_files import read_json
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter
from sparkgap.models.mtp import MTPDrafter
from sparkgap.train.calibration import calibrate
from sparkgap.train.config import TrainConfig
from sparkgap.train.conversations import file_turns, plain_encoding, prompt_lines
from sparkgap.train.evaluate import Answer, ServedAnswer, acceptance, serving_replay
from sparkgap.train.features import Example, Examples
from sparkgap.train.generation import ConversationSampler
from sparkgap.train.progress import Progress
from sparkgap.train.template import TurnTemplate


def evaluate(
    config: TrainConfig,
    target: Decoder,
    tokenizer: Tokenizer,
    template: TurnTemplate,
    examples: Examples,
    held_out: list[Example],
    progress: Progress,
) -> dict[str, Any]:
    """Acceptance on held-out conversations, and on answers to `evaluation_prompts` where they are given.

    The confidences' calibration is found here too: `confidence_calibration` in the result, None without.
    """
    tokens = config.network.num_speculative_tokens
    source = SafetensorsSource(config.out)
    checkpoint = read_drafter(read_json(config.out / "config.json"), source, config.out.name)
    kind = MTPDrafter if checkpoint.settings.method == "mtp" else Drafter
    drafter = kind.from_checkpoint(checkpoint, target, target.kernels, target.dtype)
    own = serving_replay(drafter, [(e.token_ids, e.answer_start, examples.taps(e)) for e in held_out], tokens)
    report: dict[str, Any] = {"held_out": _report(own, tokens, "held-out conversations", progress)}
    calibration = calibrate(own, tokens)
    report["confidence_calibration"] = None if calibration is None else asdict(calibration)
    if calibration is not None:
        before, after = (sum(errors) / tokens for errors in (calibration.error_before, calibration.error_after))
        progress.log(
            f"confidences: expected calibration error {before:.3f}, calibrated {after:.3f}; temperatures "
            f"{_numbers(calibration.temperatures)}, offsets {_numbers(calibration.offsets)}"
        )
    if config.evaluation_prompts is not None:
        answers = greedy_answers(config, target, tokenizer, template, progress)
        categories = prompt_categories(config.evaluation_prompts, tokenizer)
        replays = serving_replay(drafter, answers, tokens)
        turns = [tuple(ids[len(template.opening) : start - len(template.middle)].tolist()) for ids, start, _ in answers]
        measured = _report(replays, tokens, f"{len(answers)} evaluation prompts", progress)
        named = dict.fromkeys(category for turn in turns if (category := categories.get(turn)) is not None)
        measured["categories"] = {
            name: _report(
                [replay for replay, turn in zip(replays, turns, strict=True) if categories.get(turn) == name],
                tokens,
                f"evaluation prompts, {name}",
                progress,
            )
            for name in sorted(named)
        }
        report["evaluation_prompts"] = measured
    return report


def prompt_categories(path: Path, tokenizer: Tokenizer) -> dict[tuple[int, ...], str]:
    """`category` of the prompts that have one, by the prompt's token ids; `path` is one that `read_prompts` reads."""
    if path.suffix != ".jsonl":
        return {}
    encode = plain_encoding(tokenizer)
    items = [json.loads(line) for line in prompt_lines(path) if line.strip()]
    return {
        tuple(encode(str(item.get("prompt", item.get("text"))))): str(item["category"])
        for item in items
        if isinstance(item, dict) and item.get("category") is not None
    }


def greedy_answers(
    config: TrainConfig, target: Decoder, tokenizer: Tokenizer, template: TurnTemplate, progress: Progress
) -> list[Answer]:
    """The target's greedy answers to `evaluation_prompts`: token ids, answer start and captured states of each."""
    assert config.evaluation_prompts is not None
    sampling = replace(
        config.conversation, prompts=config.evaluation_prompts, only_prompts=True, answer_temperatures=(0.0,)
    )
    turns = file_turns(tokenizer, template, sampling)
    sampling = replace(sampling, shard_conversations=len(turns), lanes=min(len(turns), sampling.lanes))
    layer_ids = config.drafter_layer_ids(target.config.num_layers)
    with progress.task("answers to evaluation prompts", len(turns), "answers") as bar, torch.inference_mode():
        sampler = ConversationSampler(target, template, sampling, layer_ids, 1, plain_encoding(tokenizer))
        conversations = sampler.shard("evaluation", iter(turns), lambda _: bar.advance())
    assert conversations is not None
    return [(torch.tensor(c.token_ids), c.answer_start, c.taps) for c in conversations]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _report(answers: Sequence[ServedAnswer], tokens: int, what: str, progress: Progress) -> dict[str, Any]:
    measured = acceptance([answer.lengths for answer in answers], tokens)
    positions = " ".join(f"{share:.3f}" for share in measured.by_position)
    progress.log(
        f"{what}, greedy, served drafter: {measured.per_round:.3f} accepted a round in {measured.rounds} rounds, "
        f"by position {positions}"
    )
    return asdict(measured) | {"accepted_per_round": measured.per_round}
