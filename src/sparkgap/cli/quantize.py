"""`sparkgap quantize`: write a model directory of int8 weights."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkgap.cli.bench_options import check_positive, progress_bar
from sparkgap.cli.console import format_bytes, print_json, use_utf8_output, write_text
from sparkgap.cli.loading import load_llm
from sparkgap.config import DEFAULT_MODEL, EngineConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.quantize.run import Scheme

SCHEMES = ("w8a8-static", "w8a8-dynamic")


def quantize(
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory of the quantized model.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Catalog name, model directory, .gguf file or hf:owner/name.")
    ] = DEFAULT_MODEL,
    scheme: Annotated[str, typer.Option("--scheme", help=f"One of {', '.join(SCHEMES)}.")] = "w8a8-static",
    calibration: Annotated[
        str,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Text, or .jsonl with messages or text; default: the model's own answers.",
        ),
    ] = "default",
    calibration_tokens: Annotated[int, typer.Option("--calibration-tokens", help="Most tokens of it.")] = 4096,
    context: Annotated[int, typer.Option("--context", help="Most tokens that are read together.")] = 512,
    smoothing: Annotated[
        float | None,
        typer.Option(
            "--smoothing",
            help="Move outliers from activations to weights: 0 (off) to 1; default: static 0.75, dynamic 0.5.",
        ),
    ] = None,
    clip: Annotated[
        bool, typer.Option("--clip/--no-clip", help="Static scales of least squared error, not of the largest value.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Source of all random numbers.")] = 0,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Compute threads; default: the cores this process may use.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never download a model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Quantize a model's weights to int8 and write a directory that stands alone.

    Weights get a scale for each output channel. Activations are quantized with a scale for each token (w8a8-dynamic)
    or with one that is calibrated here (w8a8-static). The directory is in the compressed-tensors format, which vLLM
    reads too, and is used with --model DIR.
    """
    use_utf8_output()
    chosen = _scheme(scheme)
    check_positive("calibration-tokens", calibration_tokens)
    if context < 2:
        raise ConfigError(f"context must be at least 2, got {context}")
    strength = smoothing
    if strength is not None and not 0 <= strength <= 1:
        raise ConfigError(f"smoothing must be from 0 to 1, got {strength}")
    config = EngineConfig(model=model, threads=threads, allow_download=not offline, seed=seed)
    from sparkgap.catalog.quantized_checkpoint import check_output_directory

    check_output_directory(out)
    llm = load_llm(config)
    from sparkgap.quantize.run import DEFAULT_SMOOTHING, calibration_passes
    from sparkgap.quantize.run import quantize as run
    from sparkgap.quantize.texts import DEFAULT, own_answers, read_calibration

    strength = DEFAULT_SMOOTHING[chosen] if strength is None else strength
    windows: list[list[int]] = []
    passes = calibration_passes(chosen, strength)
    if passes and calibration == DEFAULT:
        with progress_bar("Writing the calibration text", calibration_tokens) as advance:
            windows = own_answers(llm, calibration_tokens, seed, advance)
    elif passes:
        windows = read_calibration(Path(calibration), llm, calibration_tokens, context)
    checkpoint = llm.checkpoint
    del llm
    with progress_bar("Calibrating", passes * len(windows)) as advance:
        report = run(checkpoint, out, chosen, windows, smoothing=strength, clip=clip, threads=threads, advance=advance)
    if as_json:
        print_json({"model": model, "out": str(out), **asdict(report)})
        return
    calibrated = f", calibrated on {report.calibration_tokens} tokens" if report.calibration_tokens else ""
    write_text(
        f"{out}: {report.scheme}, {report.products} products{calibrated}, {format_bytes(report.size_bytes)}; "
        f"use it with --model {out}\n"
    )


def _scheme(name: str) -> "Scheme":
    for scheme in SCHEMES:
        if name == scheme:
            return scheme  # type: ignore[return-value]
    raise ConfigError(f"scheme must be one of {', '.join(SCHEMES)}, got {name!r}")
