"""`sparkgap check`: is the output with speculation the one without it?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.bench.prompts import builtin_beginnings, encode_prompts
from sparkgap.cli.bench_options import PromptOptions, check_positive, load_speculating_llm, progress_bar
from sparkgap.cli.console import print_json, use_utf8_output
from sparkgap.cli.options import EngineOptions
from sparkgap.config import SamplingParams
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.bench.check import BatchCheck, Difference, Side
    from sparkgap.bench.distribution import DistributionTest

EXIT_DIFFERENT = 1
"""Exit status when speculation changed the output."""

SIGNIFICANCE = 0.001
"""Chance that a right sampler fails the distribution tests, all of them together."""

_DISTRIBUTION_PROMPTS = 3


def check(
    engine: EngineOptions,
    prompts: PromptOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 128,
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", help="Prompts decoded together. May be repeated.", show_default="1 and 8"),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Above 0: test the distribution of sampled tokens instead.")
    ] = 0.0,
    samples: Annotated[int, typer.Option("--samples", help="Samples of each prompt, with --temperature.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Check that speculation does not change the output.

    Prompts are decoded greedily with and without speculation, and the token ids are compared. With --temperature the
    first tokens of an answer are sampled many times, and tested against the target's exact probabilities.

    Exit status: 0 when nothing differs, 1 when something does, 2 on bad input.
    """
    use_utf8_output()
    sizes = list(dict.fromkeys(batch_size or (1, 8)))
    for size in sizes:
        check_positive("batch-size", size)
    check_positive("samples", samples)
    SamplingParams(max_tokens=max_tokens, temperature=temperature)
    passed = (
        _check_distribution(engine, prompts, temperature, samples, max(sizes), as_json)
        if temperature
        else _check_greedy(engine, prompts, max_tokens, sizes, as_json)
    )
    if not passed:
        raise typer.Exit(EXIT_DIFFERENT)


def _check_greedy(
    engine: EngineOptions, options: PromptOptions, max_tokens: int, sizes: list[int], as_json: bool
) -> bool:
    chosen = options.read()
    llm = load_speculating_llm(engine, max(sizes))
    from sparkgap.bench.check import check_greedy

    encoded = encode_prompts(llm, chosen, raw=options.raw)
    with progress_bar("Checking", len(encoded) * len(sizes)) as advance:
        results = [
            check_greedy(llm, encoded, max_tokens=max_tokens, batch_size=size, advance=advance) for size in sizes
        ]
    identical = not any(result.differences for result in results)
    if as_json:
        print_json(
            {
                "identical": identical,
                "max_tokens": max_tokens,
                "speculation": llm.info()["speculation"],
                "batches": [asdict(result) for result in results],
            }
        )
    else:
        for result in results:
            _print_batch(result)
        print("identical token ids with and without speculation" if identical else "DIFFERENT token ids")
    return identical


def _print_batch(result: "BatchCheck") -> None:
    accepted = result.accepted_draft_tokens / result.draft_rounds
    print(
        f"batch size {result.batch_size}: {len(result.differences)} of {result.num_prompts} prompts differ, "
        f"{result.num_tokens} tokens, {result.draft_rounds} draft rounds, {accepted:.2f} accepted a round"
    )
    for reason, number in result.not_speculated.items():
        print(f"  {number} rounds without speculation: {reason}")
    for difference in result.differences:
        _print_difference(difference)


def _print_difference(difference: "Difference") -> None:
    print(f"  prompt {difference.prompt_id}: after {difference.position} equal output tokens")
    for name, side in (("without speculation", difference.plain), ("with speculation", difference.speculative)):
        print(f"    {name}: {side.text!r} {side.token_ids}")
        print(f"      {_top(side)}")


def _top(side: "Side") -> str:
    if not side.token_ids:
        return "had ended here"
    if side.margin is None:
        return "log-probabilities not known: a second run gave other tokens"
    tokens = ", ".join(f"{entry.token!r} ({entry.token_id}) {entry.logprob:.4f}" for entry in side.top)
    return f"most probable: {tokens}; margin {side.margin:.3g}"


def _check_distribution(
    engine: EngineOptions, options: PromptOptions, temperature: float, samples: int, batch_size: int, as_json: bool
) -> bool:
    chosen = options.read(builtin_beginnings(), limit=_DISTRIBUTION_PROMPTS)
    llm = load_speculating_llm(engine, batch_size)
    from sparkgap.bench.distribution import check_distribution

    encoded = encode_prompts(llm, chosen, raw=options.raw or options.prompts is None)
    with progress_bar("Sampling", len(encoded) * samples) as advance:
        results = [
            check_distribution(
                llm, prompt, temperature=temperature, num_samples=samples, batch_size=batch_size, advance=advance
            )
            for prompt in encoded
        ]
    tests = [test for result in results for test in result.tests]
    made = [test for test in tests if test.p_value is not None]
    if not any(test.place > 1 for test in made) or not any(result.draft_rounds for result in results):
        raise ConfigError(
            f"{samples} samples of {len(encoded)} prompts tested no speculated token; raise --samples, or lower "
            "--temperature"
        )
    threshold = SIGNIFICANCE / len(made)
    passed = all(test.p_value is None or test.p_value >= threshold for test in tests)
    if as_json:
        print_json(
            {
                "passed": passed,
                "temperature": temperature,
                "samples": samples,
                "threshold": threshold,
                "speculation": llm.info()["speculation"],
                "tests": [_finite(asdict(test)) for test in tests],
            }
        )
    else:
        for test in tests:
            print(_test_line(test, threshold))
        verdict = "has the target's distribution" if passed else "has NOT the target's distribution"
        print(f"sampled output {verdict} ({len(made)} tests, threshold p = {threshold:.2g})")
    return passed


def _finite(test: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the statistic of a token that cannot be drawn is null."""
    return test | {"statistic": test["statistic"] if test["statistic"] != float("inf") else None}


def _test_line(test: "DistributionTest", threshold: float) -> str:
    head = f"prompt {test.prompt_id}, token {test.place}: {test.num_samples} samples"
    if test.p_value is None:
        return f"{head}, {'too few to test' if not test.num_cells else 'nearly always the same token: nothing to test'}"
    failed = "" if test.p_value >= threshold else "  FAILED"
    return f"{head}, {test.num_cells} cells, chi-square {test.statistic:.1f}, p = {test.p_value:.3g}{failed}"
