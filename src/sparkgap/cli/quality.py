"""`sparkgap bench quality`: what quantization costs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.bench_options import check_positive, progress_bar
from sparkgap.cli.console import format_bytes, print_json, use_utf8_output
from sparkgap.cli.loading import load_llm
from sparkgap.config import DEFAULT_MODEL, EngineConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.bench.quality import Quality

REFERENCE = "float32"


@dataclass(frozen=True)
class _Scheme:
    """One row of the table."""

    name: str
    model: str
    dtype: str
    quantization: str


def quality(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Catalog name, model directory, .gguf file or hf:owner/name.")
    ] = DEFAULT_MODEL,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="DIR", help="Directory made by `sparkgap quantize`. May be repeated."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text to predict; default: one that comes with Sparkgap."),
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens that are read together.")] = 512,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of the text.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, or an accelerator such as cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", help="Compute threads; default: the cores this process may use.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never download a model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Compare bfloat16, W8A8 and quantized directories with the float32 reference on held text.

    The text is cut into pieces, and every token after a piece's first is predicted from those before it. Reported are
    perplexity, the mean divergence of the next-token distributions from the reference's (KL, in nats a token; and the
    99th percentile of single tokens), and how often both find the same token most probable. The text that comes with
    Sparkgap was written for this measurement: stories, letters, explanations, a program, about 2,000 words.
    """
    use_utf8_output()
    if context < 2:
        raise ConfigError(f"context must be at least 2, got {context}")
    if max_tokens is not None:
        check_positive("max-tokens", max_tokens)
    if text is not None and not text.is_file():
        raise ConfigError(f"no text file {text}; check the path")
    for directory in also or ():
        if not Path(directory).is_dir():
            raise ConfigError(f"no model directory {directory} to compare; make it with `sparkgap quantize`")
    schemes = [
        _Scheme("bfloat16", model, "bfloat16", "none"),
        _Scheme("w8a8 (dynamic)", model, "auto", "w8a8"),
        *(_Scheme(directory, directory, "auto", "auto") for directory in also or ()),
    ]

    def load(scheme: _Scheme) -> Any:
        return load_llm(
            EngineConfig(
                model=scheme.model,
                dtype=scheme.dtype,
                quantization=scheme.quantization,
                device=device,
                max_num_seqs=1,
                threads=threads,
                graphs="off",
                allow_download=not offline,
            )
        )

    llm = load(_Scheme(REFERENCE, model, REFERENCE, "none"))
    from sparkgap.bench.quality import Reference, held_text, measure_quality, read_text, text_windows

    windows = text_windows(
        llm, held_text() if text is None else read_text(text), min(context, llm.info()["max_model_len"]), max_tokens
    )
    results: dict[str, Quality] = {}
    with progress_bar("Measuring", (2 + len(schemes)) * len(windows)) as advance:
        reference = Reference(llm, windows, advance)
        results[REFERENCE] = measure_quality(llm, reference, advance)
        for scheme in schemes:
            other = load(scheme)
            _check_same_tokens(llm, other, scheme)
            results[scheme.name] = measure_quality(other, reference, advance)
            del other
    if as_json:
        print_json(
            {
                "model": model,
                "text": "built-in" if text is None else str(text),
                "context": context,
                "tokens": results[REFERENCE].tokens,
                "schemes": {name: asdict(result) for name, result in results.items()},
            }
        )
    else:
        _print_table(results)


def _check_same_tokens(reference: Any, other: Any, scheme: _Scheme) -> None:
    if other.info()["vocab_size"] != reference.info()["vocab_size"]:
        raise ConfigError(f"{scheme.name} has another vocabulary than {reference.config.model}; compare the same model")


def _print_table(results: "dict[str, Quality]") -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("", overflow="fold"), "perplexity", "mean KL", "99% KL", "same top token", "weights / token")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.perplexity:.3f}",
            f"{result.mean_kl:.5f}",
            f"{result.kl_99:.4f}",
            f"{result.top1_agreement:.2%}",
            format_bytes(result.weight_bytes_per_token),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{results[REFERENCE].tokens} tokens predicted; KL in nats a token, from {REFERENCE}'s distribution")
