"""`sparkgap check`: is the output with speculation the one without it?"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.bench.prompts import builtin_beginnings, encode_prompts
from sparkgap.cli import loading
from sparkgap.cli.bench_options import PromptOptions, check_positive, mode_configs, progress_bar, speculating_config
from sparkgap.cli.console import print_json, use_utf8_output
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES, EngineConfig, SamplingParams
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.bench.check import BatchCheck, Difference, Side
    from sparkgap.bench.distribution import DistributionCheck, DistributionTest

EXIT_DIFFERENT = 1
"""Exit status when speculation changed the output."""

SIGNIFICANCE = 0.001
"""Chance that a right sampler fails the distribution tests, all of them together."""

_DISTRIBUTION_PROMPTS = 3

_SAMPLES_TOGETHER = 32
"""Samples that are drawn together unless `--batch-size` says otherwise."""


def check(
    engine: EngineOptions,
    prompts: PromptOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 128,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            help="Prompts decoded together; default: 1 and 8. May be repeated.",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help=f"Also compare {', '.join(EXECUTION_MODES)}. May be repeated; see --graphs.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Above 0: test the distribution of sampled tokens instead.")
    ] = 0.0,
    samples: Annotated[int, typer.Option("--samples", help="Samples of each prompt, with --temperature.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Check that speculation does not change the output.

    Prompts are decoded greedily with and without speculation, and the token ids are compared; with several modes also
    those of the modes. With --temperature the first tokens of an answer are sampled many times, and tested against the
    target's exact probabilities.

    Exit status: 0 when nothing differs, 1 when something does, 2 on bad input.
    """
    use_utf8_output()
    sizes = list(dict.fromkeys(batch_size or ((_SAMPLES_TOGETHER,) if temperature else (1, 8))))
    for size in sizes:
        check_positive("batch-size", size)
    check_positive("samples", samples)
    SamplingParams(max_tokens=max_tokens, temperature=temperature)
    modes = list(dict.fromkeys(mode or ()))
    passed = (
        _check_distribution(engine, prompts, temperature, samples, max(sizes), modes, as_json)
        if temperature
        else _check_greedy(engine, prompts, max_tokens, sizes, modes, as_json)
    )
    if not passed:
        raise typer.Exit(EXIT_DIFFERENT)


def _configs(config: EngineConfig, modes: list[str]) -> dict[str, EngineConfig]:
    """What is checked, by the name of the mode; one without a name where no mode was given."""
    return mode_configs(config, modes) if modes else {"": config}


def _check_greedy(
    engine: EngineOptions, options: PromptOptions, max_tokens: int, sizes: list[int], modes: list[str], as_json: bool
) -> bool:
    configs = _configs(speculating_config(engine, max(sizes)), modes)
    chosen = options.read()
    checks: dict[str, list[BatchCheck]] = {}
    speculation = None
    for name, config in configs.items():
        llm = loading.load_llm(config)
        from sparkgap.bench.check import check_greedy

        speculation = llm.info()["speculation"]
        encoded = encode_prompts(llm, chosen, raw=options.raw)
        with progress_bar(f"Checking {name}".rstrip(), len(encoded) * len(sizes)) as advance:
            checks[name] = [
                check_greedy(llm, encoded, max_tokens=max_tokens, batch_size=size, advance=advance) for size in sizes
            ]
        if not as_json:
            for result in checks[name]:
                _print_batch(name, result)
    same_modes = all(len({result.digest for result in of_size}) == 1 for of_size in zip(*checks.values(), strict=True))
    identical = same_modes and not any(result.differences for results in checks.values() for result in results)
    if as_json:
        batches = [
            ({"mode": name} if name else {}) | asdict(result) for name, results in checks.items() for result in results
        ]
        report = {"identical": identical, "max_tokens": max_tokens, "speculation": speculation, "batches": batches}
        print_json(report | ({"same_in_all_modes": same_modes} if modes else {}))
    else:
        if not same_modes:
            print("DIFFERENT token ids without speculation in different modes")
        in_modes = f", in {len(modes)} modes" if len(modes) > 1 else ""
        print(f"identical token ids with and without speculation{in_modes}" if identical else "DIFFERENT token ids")
    return identical


def _print_batch(mode: str, result: "BatchCheck") -> None:
    accepted = result.accepted_draft_tokens / result.draft_rounds
    print(
        f"{_prefix(mode)}batch size {result.batch_size}: {len(result.differences)} of {result.num_prompts} prompts "
        f"differ, {result.num_tokens} tokens, {result.draft_rounds} draft rounds, {accepted:.2f} accepted a round"
    )
    for reason, number in result.not_speculated.items():
        print(f"  {number} rounds without speculation: {reason}")
    for difference in result.differences:
        _print_difference(difference)


def _prefix(mode: str) -> str:
    return f"{mode}, " if mode else ""


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
    engine: EngineOptions,
    options: PromptOptions,
    temperature: float,
    samples: int,
    batch_size: int,
    modes: list[str],
    as_json: bool,
) -> bool:
    configs = _configs(speculating_config(engine, batch_size), modes)
    chosen = options.read(builtin_beginnings(), limit=_DISTRIBUTION_PROMPTS)
    results: list[tuple[str, DistributionCheck]] = []
    speculation = None
    for name, config in configs.items():
        llm = loading.load_llm(_with_short_blocks(config))
        from sparkgap.bench.distribution import check_distribution

        speculation = llm.info()["speculation"]
        encoded = encode_prompts(llm, chosen, raw=options.raw or options.prompts is None)
        with progress_bar(f"Sampling {name}".rstrip(), len(encoded) * samples) as advance:
            for prompt in encoded:
                found = check_distribution(
                    llm, prompt, temperature=temperature, num_samples=samples, batch_size=batch_size, advance=advance
                )
                results.append((name, found))
    tests = [(name, test) for name, result in results for test in result.tests]
    made = [test for _, test in tests if test.p_value is not None]
    if not any(test.place > 1 for test in made) or not any(result.draft_rounds for _, result in results):
        raise ConfigError(
            f"{samples} samples of {len(chosen)} prompts tested no speculated token; raise --samples or --temperature"
        )
    threshold = SIGNIFICANCE / len(made)
    passed = all(test.p_value >= threshold for test in made if test.p_value is not None)
    if as_json:
        print_json(
            {
                "passed": passed,
                "temperature": temperature,
                "samples": samples,
                "threshold": threshold,
                "speculation": speculation,
                "tests": [({"mode": name} if name else {}) | _finite(asdict(test)) for name, test in tests],
            }
        )
    else:
        for name, test in tests:
            print(_test_line(name, test, threshold))
        verdict = "has the target's distribution" if passed else "has NOT the target's distribution"
        print(f"sampled output {verdict} ({len(made)} tests, threshold p = {threshold:.2g})")
    return passed


def _with_short_blocks(config: EngineConfig) -> EngineConfig:
    """The configuration with no more draft tokens than can be among those sampled, unless it says how many."""
    wanted = config.speculative_config
    if wanted is None or wanted.num_speculative_tokens is not None:
        return config
    number = loading.num_draft_tokens(config)
    from sparkgap.bench.distribution import DRAFT_TOKENS

    short = replace(wanted, num_speculative_tokens=min(number, DRAFT_TOKENS))
    return replace(config, speculative_config=short)


def _finite(test: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the statistic of a token that cannot be drawn is null."""
    return test | {"statistic": test["statistic"] if test["statistic"] != float("inf") else None}


def _test_line(mode: str, test: "DistributionTest", threshold: float) -> str:
    head = (
        f"{_prefix(mode)}prompt {test.prompt_id}, token {test.place}: {test.num_samples} samples after "
        f"{test.num_beginnings} beginnings"
    )
    if test.p_value is None:
        return f"{head}, {'nearly always the same token: nothing to test' if test.num_cells else 'too few to test'}"
    failed = "" if test.p_value >= threshold else "  FAILED"
    return f"{head}, {test.num_cells} cells, chi-square {test.statistic:.1f}, p = {test.p_value:.3g}{failed}"
