"""The other half of `sparkgap check`: whether sampled tokens have the target's distribution."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sparkgap.bench.prompts import builtin_beginnings, encode_prompts
from sparkgap.cli import loading
from sparkgap.cli.bench_options import PromptOptions, progress_bar
from sparkgap.cli.check_variants import Variant
from sparkgap.cli.console import print_json
from sparkgap.config import EngineConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.bench.distribution import DistributionCheck, DistributionTest

SIGNIFICANCE = 0.001
"""Chance that a right sampler fails the distribution tests, all of them together."""

_DISTRIBUTION_PROMPTS = 3


def check_distribution_of(
    variants: Sequence[Variant],
    options: PromptOptions,
    *,
    temperature: float,
    samples: int,
    batch_size: int,
    as_json: bool,
) -> bool:
    """Test sampled tokens of every engine against the target's exact probabilities, and report.

    Args:
        variants: the engines.
        options: the prompts; the built-in ones are short texts.
        temperature: above 0.
        samples: of each prompt.
        batch_size: samples that are drawn together.
        as_json: one JSON object instead of lines.

    Returns:
        Whether every test passed.

    Raises:
        ConfigError: no speculated token was tested.
        SparkgapError: an engine cannot be had, or computing failed.
    """
    chosen = options.read(builtin_beginnings(), limit=_DISTRIBUTION_PROMPTS)
    results: list[tuple[Variant, DistributionCheck]] = []
    speculation = None
    for variant in variants:
        llm = loading.load_llm(_with_short_blocks(variant.config))
        from sparkgap.bench.distribution import HORIZON_TOKENS, check_distribution

        speculation = llm.info()["speculation"]
        raw = options.raw or options.prompts is None
        encoded = encode_prompts(llm, chosen, raw=raw, fewest_output_tokens=HORIZON_TOKENS)
        with progress_bar(f"Sampling {variant.name}".rstrip(), len(encoded) * samples) as advance:
            for prompt in encoded:
                found = check_distribution(
                    llm, prompt, temperature=temperature, num_samples=samples, batch_size=batch_size, advance=advance
                )
                results.append((variant, found))
        # One engine at a time.
        del llm
    tests = [(variant, test) for variant, result in results for test in result.tests]
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
                "tests": [_settings(variant) | _finite(asdict(test)) for variant, test in tests],
            }
        )
    else:
        for variant, test in tests:
            print(_test_line(variant, test, threshold))
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


def _settings(variant: Variant) -> dict[str, Any]:
    """What the options named of an engine."""
    named = {"mode": variant.mode, "num_speculative_tokens": variant.num_speculative_tokens}
    return {name: value for name, value in named.items() if value is not None}


def _finite(test: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the statistic of a token that cannot be drawn is null."""
    return test | {"statistic": test["statistic"] if test["statistic"] != float("inf") else None}


def _test_line(variant: Variant, test: "DistributionTest", threshold: float) -> str:
    head = (
        f"{variant.name}{', ' if variant.name else ''}prompt {test.prompt_id}, token {test.place}: "
        f"{test.num_samples} samples after {test.num_beginnings} beginnings"
    )
    if test.p_value is None:
        return f"{head}, {'nearly always the same token: nothing to test' if test.num_cells else 'too few to test'}"
    failed = "" if test.p_value >= threshold else "  FAILED"
    return f"{head}, {test.num_cells} cells, chi-square {test.statistic:.1f}, p = {test.p_value:.3g}{failed}"
