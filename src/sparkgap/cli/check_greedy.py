"""The greedy half of `sparkgap check`: token ids with and without speculation, over a sweep of settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt, encode_prompts
from sparkgap.cli import loading
from sparkgap.cli.bench_options import progress_bar
from sparkgap.cli.check_variants import Variant
from sparkgap.cli.console import print_json, write_text

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.bench.check import BatchCheck, Difference, Side


_NUMBER_WIDTHS = (3, 6, 8, 8, 8, 15)


@dataclass(frozen=True)
class Combination:
    """One line of a sweep.

    Attributes:
        mode: execution mode; None where none was named.
        num_speculative_tokens: draft tokens a round.
        result: of one batch size.
    """

    mode: str | None
    num_speculative_tokens: int
    result: "BatchCheck"

    @property
    def report(self) -> dict[str, Any]:
        """As one JSON object."""
        named = {} if self.mode is None else {"mode": self.mode}
        return named | {"num_speculative_tokens": self.num_speculative_tokens} | asdict(self.result)


class GreedySweep:
    """Checks engines one after the other, and tells of each combination as soon as it is known.

    Args:
        variants: the engines, the first of which decodes plainly for all unless `same_batch`.
        prompts: what they complete.
        raw: without the chat template.
        max_tokens: most output tokens of each.
        batch_sizes: prompts that run together, for each engine.
        same_batch: decode plainly on each engine at each batch size.
        as_json: one JSON object at the end, instead of lines.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        prompts: Sequence[BenchPrompt],
        *,
        raw: bool,
        max_tokens: int,
        batch_sizes: Sequence[int],
        same_batch: bool,
        as_json: bool,
    ) -> None:
        self._variants = variants
        self._prompts = prompts
        self._raw = raw
        self._max_tokens = max_tokens
        self._batch_sizes = batch_sizes
        self._same_batch = same_batch
        self._as_json = as_json
        self._plain: list[list[int]] | None = None
        self._speculation: dict[str, Any] | None = None
        self._done: list[Combination] = []

    def run(self) -> bool:
        """Check everything and report; whether all token ids are the same.

        Raises:
            KeyboardInterrupt: it was interrupted, and what was known by then is reported.
            SparkgapError: an engine cannot be had, nothing was speculated, or computing failed.
        """
        try:
            for variant in self._variants:
                self._check(variant)
        except KeyboardInterrupt:
            self._conclude()
            raise
        self._conclude()
        return self._identical

    @property
    def _num_combinations(self) -> int:
        return len(self._variants) * len(self._batch_sizes)

    @property
    def _identical(self) -> bool:
        return self._same_everywhere and not any(combination.result.differences for combination in self._done)

    @property
    def _same_everywhere(self) -> bool:
        """Whether the token ids with speculation are the same in all modes and with all numbers of draft tokens."""
        digests: dict[int, set[str]] = {}
        for combination in self._done:
            digests.setdefault(combination.result.batch_size, set()).add(combination.result.digest)
        return all(len(of_size) == 1 for of_size in digests.values())

    def _check(self, variant: Variant) -> None:
        """One engine at all batch sizes. It is gone when this returns, so that there is never a second one."""
        llm = loading.load_llm(variant.config)
        from sparkgap.bench.check import check_greedy

        self._speculation = llm.info()["speculation"]
        number = self._speculation["num_speculative_tokens"] if self._speculation else 0
        encoded = encode_prompts(llm, self._prompts, raw=self._raw)
        if self._plain is None and not self._same_batch:
            self._plain = self._decode_plain(llm, encoded)
        for size in self._batch_sizes:
            with progress_bar(self._description(variant, size), len(encoded), transient=True) as advance:
                result = check_greedy(
                    llm,
                    encoded,
                    max_tokens=self._max_tokens,
                    batch_size=size,
                    plain=self._plain,
                    advance=advance,
                )
            self._add(Combination(variant.mode, number, result))

    def _decode_plain(self, llm: "LLM", encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        from sparkgap.bench.check import decode_plain

        with progress_bar("Decoding without speculation", len(encoded), transient=True) as advance:
            size = max(self._batch_sizes)
            return decode_plain(llm, encoded, max_tokens=self._max_tokens, batch_size=size, advance=advance)

    def _description(self, variant: Variant, size: int) -> str:
        if self._num_combinations == 1:
            return "Checking"
        place = f"{len(self._done) + 1} of {self._num_combinations}"
        return " ".join(part for part in ("Checking", variant.name, f"batch {size} ({place})") if part)

    def _add(self, combination: Combination) -> None:
        self._done.append(combination)
        if self._as_json:
            return
        if len(self._done) == 1:
            write_text(_row("mode", "N", "batch", "prompts", "tokens", "rounds", "accepted/round", "token ids"))
        result = combination.result
        write_text(
            _row(
                combination.mode or "default",
                combination.num_speculative_tokens,
                result.batch_size,
                result.num_prompts,
                result.num_tokens,
                result.draft_rounds,
                f"{result.accepted_draft_tokens / result.draft_rounds:.2f}",
                _verdict(result),
            )
        )
        for reason, times in result.not_speculated.items():
            write_text(f"  {times} rounds without speculation: {reason}\n")
        for difference in result.differences:
            write_text(_difference_lines(difference))

    def _conclude(self) -> None:
        complete = len(self._done) == self._num_combinations
        if self._as_json:
            report = {
                "identical": self._identical,
                "complete": complete,
                "max_tokens": self._max_tokens,
                "plain_batch_size": None if self._same_batch else max(self._batch_sizes),
                "speculation": self._speculation,
                "batches": [combination.report for combination in self._done],
            }
            named = any(variant.mode is not None for variant in self._variants)
            print_json(report | ({"same_in_all_modes": self._same_everywhere} if named else {}))
            return
        if not complete:
            write_text(f"interrupted after {len(self._done)} of {self._num_combinations} combinations\n")
        if not self._same_everywhere:
            write_text("DIFFERENT token ids with different settings\n")
        if not self._identical:
            write_text("DIFFERENT token ids with and without speculation\n")
        elif self._done:
            number = f", in {len(self._done)} combinations" if len(self._done) > 1 else ""
            write_text(f"identical token ids with and without speculation{number}\n")


def _row(*cells: object) -> str:
    mode, *numbers, verdict = map(str, cells)
    columns = " ".join(number.rjust(width) for number, width in zip(numbers, _NUMBER_WIDTHS, strict=True))
    return f"{mode:<8} {columns}  {verdict}\n"


def _verdict(result: "BatchCheck") -> str:
    if not result.differences:
        return "identical"
    first = result.differences[0]
    number = f"{len(result.differences)} of {result.num_prompts} prompts differ"
    return f"{number}, first {first.prompt_id} after {first.position} tokens"


def _difference_lines(difference: "Difference") -> str:
    lines = [f"  prompt {difference.prompt_id}: after {difference.position} equal output tokens"]
    for name, side in (("without speculation", difference.plain), ("with speculation", difference.speculative)):
        lines += [f"    {name}: {side.text!r} {side.token_ids}", f"      {_top(side)}"]
    return "\n".join(lines) + "\n"


def _top(side: "Side") -> str:
    if not side.token_ids:
        return "had ended here"
    if side.margin is None:
        return "log-probabilities not known: a second run gave other tokens"
    tokens = ", ".join(f"{entry.token!r} ({entry.token_id}) {entry.logprob:.4f}" for entry in side.top)
    return f"most probable: {tokens}; margin {side.margin:.3g}"
