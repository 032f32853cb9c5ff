"""`sparkgap check`: is the output with speculation the one without it?"""

from typing import Annotated

import typer

from sparkgap.cli.bench_options import PromptOptions, check_positive
from sparkgap.cli.check_distribution import check_distribution_of
from sparkgap.cli.check_greedy import GreedySweep
from sparkgap.cli.check_variants import ALL_MODES, make_variants, number_list, read_modes
from sparkgap.cli.console import use_utf8_output
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES, SamplingParams

EXIT_DIFFERENT = 1
"""Exit status when speculation changed the output."""

_SAMPLES_TOGETHER = 32
"""Samples that are drawn together unless `--batch-size` says otherwise."""


def check(
    engine: EngineOptions,
    prompts: PromptOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 128,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="MODE,...",
            help=f"Check {', '.join(EXECUTION_MODES)}, or {ALL_MODES} of them; see --graphs.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--num-speculative-tokens", metavar="N,...", help="Draft tokens a round; default: the drafter's own."
        ),
    ] = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option("--batch-size", metavar="N,...", help="Prompts decoded together; default: 1,8."),
    ] = None,
    same_batch: Annotated[
        bool,
        typer.Option(
            "--same-batch", help="Decode without speculation for each combination, not once: for devices that mix rows."
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Above 0: test the distribution of sampled tokens instead.")
    ] = 0.0,
    samples: Annotated[int, typer.Option("--samples", help="Samples of each prompt, with --temperature.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Check that speculation does not change the output.

    Prompts are decoded greedily with and without speculation, and the token ids are compared. --mode,
    --num-speculative-tokens and --batch-size take lists: every combination is checked, and told in a line as soon as
    it is known. With --temperature the first tokens of an answer are sampled many times, and tested against the
    target's exact probabilities.

    Without speculation the prompts are decoded once, in the first mode and at the largest batch size, and compared
    with every combination: rows do not depend on each other, so greedy tokens without speculation are the same at
    every batch size and in every mode. --same-batch decodes them anew for each combination.

    Exit status: 0 when nothing differs, 1 when something does, 2 on bad input.
    """
    use_utf8_output()
    sizes = number_list("batch-size", batch_size) or ([_SAMPLES_TOGETHER] if temperature else [1, 8])
    numbers = number_list("num-speculative-tokens", num_speculative_tokens)
    check_positive("samples", samples)
    SamplingParams(max_tokens=max_tokens, temperature=temperature)
    variants = make_variants(engine, read_modes(mode), numbers, max(sizes))
    if temperature:
        passed = check_distribution_of(
            variants, prompts, temperature=temperature, samples=samples, batch_size=max(sizes), as_json=as_json
        )
    else:
        passed = GreedySweep(
            variants,
            prompts.read(),
            raw=prompts.raw,
            max_tokens=max_tokens,
            batch_sizes=sizes,
            same_batch=same_batch,
            as_json=as_json,
        ).run()
    if not passed:
        raise typer.Exit(EXIT_DIFFERENT)
