"""Checks and benches on tiny models: they measure right, and a check fails when something is wrong."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import scipy.stats
import torch

from sparkgap import LLM, SamplingParams
from sparkgap.bench.acceptance import by_category, measure_acceptance, summarize
from sparkgap.bench.check import check_greedy, first_difference
from sparkgap.bench.distribution import _Groups, check_distribution, chi_square
from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt, builtin_prompts, encode_prompts, read_prompts
from sparkgap.cli import bench_options, main
from sparkgap.cli.bench_options import PromptOptions
from sparkgap.config import EXECUTION_MODES
from sparkgap.errors import ConfigError, PromptError
from sparkgap.graphs.captured import CapturedPasses
from sparkgap.graphs.passes import Passes
from sparkgap.rounds import verifying
from sparkgap.rounds.sequence import SampledToken
from sparkgap.rounds.verification import Settlement, exact_match, rejection
from tests.speculating_model import write_looping_pair, write_random_drafter

SETTINGS = {"dtype": "float32", "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("bench"))
    return str(model), str(drafter)


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(pair[0], speculative_config={"model": pair[1]}, **SETTINGS)


@pytest.fixture(scope="module")
def sampling_llm(pair):
    config = {"model": pair[1], "draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    return LLM(pair[0], speculative_config=config, max_num_seqs=128, **SETTINGS)


@pytest.fixture
def prompts(llm):
    texts = [BenchPrompt("a", "hello", "x"), BenchPrompt("b", "zq"), BenchPrompt("c", "abc", "x")]
    return encode_prompts(llm, texts, raw=True)


def wrong_at(place):
    """`exact_match` that also accepts, from sequences whose output has `place` tokens, the first draft token."""

    def match(sampler, logits, drafted):
        settlements = exact_match(sampler, logits, drafted)
        for index, draft in enumerate(drafted):
            if len(draft.sequence.output_token_ids) >= place and not settlements[index].num_accepted:
                tokens = [SampledToken(token_id, None) for token_id in draft.token_ids[:1]]
                logprobs = settlements[index].tokens[0].logprobs
                settlements[index] = Settlement([t._replace(logprobs=logprobs) for t in (*tokens, *tokens)], 1)
        return settlements

    return match


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    monkeypatch.setattr(bench_options, "PROGRESS_LINE_S", 1e9)


@pytest.fixture
def command(pair, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nzq\nabc\n")

    def run(*arguments, drafter=pair[1]):
        options = ["--model", pair[0], "--prompts", str(file), "--raw", "--dtype", "float32", "--threads", "1"]
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, *options, *(["--draft", drafter] if drafter else [])])
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run


def test_identical(llm, prompts):
    for size in (1, 2, 8):
        seen = []
        result = check_greedy(llm, prompts, max_tokens=30, batch_size=size, advance=seen.append)
        assert result.differences == []
        assert (result.num_prompts, sum(seen)) == (3, 3)
        outputs = llm.generate([p.token_ids for p in prompts], SamplingParams(temperature=0, max_tokens=30))
        assert result.num_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
        assert result.accepted_draft_tokens == sum(o.metrics.accepted_draft_tokens for o in outputs) > 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_wrong_token_is_found_where_it_is(pair, prompts, monkeypatch, size):
    llm = LLM(pair[0], speculative_config={"model": pair[1]}, task_pipeline="off", **SETTINGS)
    off = SamplingParams(temperature=0, max_tokens=40, speculation=False, logprobs=2)
    plain = [o.outputs[0] for o in llm.generate([p.token_ids for p in prompts], off)]
    monkeypatch.setattr(verifying, "exact_match", wrong_at(5))
    result = check_greedy(llm, prompts, max_tokens=40, batch_size=size)
    assert result.differences
    for difference in result.differences:
        index = [p.prompt.id for p in prompts].index(difference.prompt_id)
        expected = plain[index]
        position = difference.position
        assert position >= 5
        assert difference.plain.token_ids == expected.token_ids[position : position + 16]
        assert difference.speculative.token_ids[0] != difference.plain.token_ids[0]
        top = sorted((entry.logprob for entry in expected.logprobs[position].values()), reverse=True)
        assert difference.plain.top[0].token_id == expected.token_ids[position]
        assert [entry.logprob for entry in difference.plain.top] == pytest.approx(top, abs=1e-4)
        assert difference.plain.margin == pytest.approx(top[0] - top[1], abs=1e-4)
        assert difference.speculative.margin is not None


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_nothing_speculated_is_no_success(pair, tmp_path, prompts):
    short = write_random_drafter(tmp_path / "short", max_position_embeddings=8)
    llm = LLM(pair[0], speculative_config={"model": str(short)}, **SETTINGS)
    long = [EncodedPrompt(BenchPrompt("long", ""), [1] * 30)]
    with pytest.raises(ConfigError, match="nothing was checked: context longer"):
        check_greedy(llm, long, max_tokens=10, batch_size=1)
    with pytest.raises(ConfigError, match="first token"):
        check_greedy(llm, prompts, max_tokens=1, batch_size=1)


def test_check_command(command, monkeypatch):
    status, out, err = command("check", "--max-tokens", "20")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [(row[2], row[3], row[-1]) for row in rows[1:3]] == [("1", "3", "identical"), ("8", "3", "identical")]
    assert out.endswith("identical token ids with and without speculation, in 2 combinations\n")
    status, out, _ = command("check", "--max-tokens", "20", "--batch-size", "2", "--limit", "2", "--json")
    report = json.loads(out)
    assert (status, report["identical"]) == (0, True)
    assert [(b["batch_size"], b["num_prompts"]) for b in report["batches"]] == [(2, 2)]
    monkeypatch.setattr(verifying, "exact_match", wrong_at(4))
    on_the_host = ("--task-pipeline", "off")
    status, out, _ = command("check", "--max-tokens", "30", "--batch-size", "1", *on_the_host)
    assert status == 1
    assert "DIFFERENT" in out
    assert "margin" in out
    status, out, _ = command("check", "--max-tokens", "30", "--batch-size", "1", "--json", *on_the_host)
    report = json.loads(out)
    assert (status, report["identical"]) == (1, False)
    difference = report["batches"][0]["differences"][0]
    assert difference["plain"]["top"][0]["token_id"] == difference["plain"]["token_ids"][0]
    assert len(difference["plain"]["top"]) == len(difference["speculative"]["top"]) == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["check", "--batch-size", "0"], "batch-size must be at least 1"),
        (["check", "--max-tokens", "0"], "max_tokens"),
        (["check", "--limit", "0"], "limit must be at least 1"),
        (["check", "--samples", "0"], "samples must be at least 1"),
        (["check", "--temperature", "nan"], "temperature"),
        (["check", "--no-speculation"], "--no-speculation"),
        (["check", "--num-speculative-tokens", "6"], "from 1 to 5"),
        (["check", "--temperature", "1", "--samples", "20"], "raise --samples"),
        (["bench", "acceptance", "--batch-size", "-1"], "batch-size must be at least 1"),
        (["bench", "acceptance", "--no-speculation"], "--no-speculation"),
    ],
)
def test_bad_input(command, arguments, part):
    drafter = {"drafter": None} if "--no-speculation" in arguments else {}
    status, out, err = command(*arguments, **drafter)
    assert (status, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1


def test_without_a_drafter(command):
    for arguments in (["check"], ["bench", "acceptance"]):
        status, out, err = command(*arguments, drafter=None)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "--draft DIR" in err


def test_prompt_files(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\\u2028b", "id": 7, "category": "math"}\n\n{"prompt": "c"}\n')
    assert read_prompts(file) == [BenchPrompt("7", "a\u2028b", "math"), BenchPrompt("line 3", "c")]
    text = tmp_path / "p.txt"
    text.write_text("one\ntwo \n")
    assert read_prompts(text) == [BenchPrompt("line 1", "one"), BenchPrompt("line 2", "two")]
    for content, part in (
        (b"", "no prompt"),
        (b'{"prompt": 3}', "line 1 must be an object"),
        (b'{"prompt": "a"}\n[1]', "line 2 must be an object"),
        (b'{"prompt": "a"', "line 1 is not valid JSON"),
        (b"[" * 100_000, "line 1 is not valid JSON"),
        (b'{"prompt": "a", "category": 3}', "category"),
        (b"\xff", "UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(PromptError, match=part):
            read_prompts(file)
    with pytest.raises(PromptError, match="cannot read"):
        read_prompts(tmp_path / "none")


def test_a_limit_takes_an_even_spread_of_a_file(tmp_path):
    file = tmp_path / "sorted.jsonl"
    lines = [{"prompt": str(number), "category": "abc"[number // 4]} for number in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def taken(limit):
        return [prompt.text for prompt in PromptOptions(prompts=file, limit=limit).read()]

    assert taken(3) == ["0", "4", "8"]
    assert taken(5) == ["0", "2", "4", "7", "9"]
    assert taken(1) == ["0"]
    assert taken(12) == taken(20) == taken(None) == [str(number) for number in range(12)]
    assert [p.text for p in PromptOptions(limit=4).read()] == [p.text for p in builtin_prompts()[:4]]


def test_builtin_prompts_are_distinct_and_of_three_categories(llm):
    prompts = builtin_prompts()
    assert {p.category for p in prompts} == {p.category for p in prompts[:3]} == {"math", "code", "chat"}
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == len(prompts) >= 12


def test_prompt_too_long_is_named(llm):
    with pytest.raises(PromptError, match="prompt big has 200 tokens"):
        encode_prompts(llm, [BenchPrompt("big", "x" * 200)], raw=True)


def test_acceptance_adds_up(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    measured = measure_acceptance(llm, prompts, params, batch_size=2)
    metrics = [m for _, m in measured]
    total = summarize(metrics)
    rounds = sum(m.draft_rounds for m in metrics)
    assert (total.num_prompts, total.draft_rounds, total.draft_tokens) == (3, rounds, 5 * rounds)
    assert total.acceptance_rate == pytest.approx(sum(m.acceptance_rate for m in metrics) / 3)
    assert total.accepted_per_round == pytest.approx(total.accepted_draft_tokens / rounds)
    assert total.tokens_per_round == pytest.approx(total.accepted_per_round + 1)
    assert sum(total.acceptance_by_position) == pytest.approx(total.accepted_per_round)
    product = 1.0
    for share, conditional in zip(total.acceptance_by_position, total.conditional_acceptance, strict=True):
        product *= conditional
        assert product == pytest.approx(share)
    categories = by_category(measured)
    assert list(categories) == ["x"]
    assert categories["x"] == summarize([metrics[0], metrics[2]])


def test_acceptance_command(command, tmp_path):
    status, out, err = command("bench", "acceptance", "--max-tokens", "20", "--batch-size", "2", "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["overall"]["num_prompts"] == 3
    assert report["overall"]["accepted_per_round"] > 1
    assert report["categories"] == {}
    status, out, _ = command("bench", "acceptance", "--max-tokens", "20", "--temperature", "0.5")
    assert status == 0
    assert "acceptance" in out
    assert "given all before" in out


@pytest.mark.parametrize("seed", range(5))
def test_chi_square_is_scipys(seed):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(12, generator=generator, dtype=torch.float64) + 0.3
    probabilities /= probabilities.sum()
    draws = torch.multinomial(probabilities, 900, replacement=True, generator=generator)
    counts = torch.bincount(draws, minlength=12).double()
    statistic, cells = chi_square(counts.clone(), probabilities * 900)
    expected = scipy.stats.chisquare(counts, probabilities * 900)
    assert (statistic, cells) == pytest.approx((expected.statistic, 12), rel=1e-6)
    groups = _Groups()
    groups.add(Counter(draws.tolist()), probabilities)
    assert groups.test() == pytest.approx((expected.statistic, 12, expected.pvalue), rel=1e-6)


def in_one_group(counts, probabilities):
    groups = _Groups()
    groups.add(counts, torch.tensor(probabilities))
    return groups.test()


def test_chi_square_pools_rare_tokens():
    statistic, cells, p_value = in_one_group({0: 500, 1: 400, 2: 60, 3: 40}, [0.5, 0.4] + [0.1 / 50] * 50)
    assert cells == 3
    assert statistic == pytest.approx(0, abs=1e-4)
    assert p_value == pytest.approx(1, abs=1e-3)
    assert in_one_group({0: 60}, [1.0, 0.0]) == (0.0, 1, None)
    assert in_one_group({0: 60, 1: 1}, [1.0, 0.0])[2] == 0.0
    assert in_one_group({0: 60, 1: 38, 2: 2}, [0.6, 0.38, 0.02])[1] == 2
    assert in_one_group({0: 2, 1: 1}, [0.5, 0.5])[1:] == (1, None)


@pytest.mark.parametrize("seed", range(3))
def test_draws_from_many_distributions(seed):
    """Nearly every draw from one of its own: right ones pass, and wrong ones do not."""
    generator = torch.Generator().manual_seed(seed)
    right, wrong = _Groups(), _Groups()
    for index in range(1500):
        probabilities = (2.5 * torch.randn(40, generator=generator)).softmax(-1)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        right.add({token: 1}, probabilities)
        wrong.add({index % 2 if torch.rand(1, generator=generator) < 0.15 else token: 1}, probabilities)
    assert right.test()[1] > 20
    assert right.test()[2] > 1e-3
    assert wrong.test()[2] < 1e-5


def test_distribution(sampling_llm):
    prompt = EncodedPrompt(BenchPrompt("p", ""), [104, 105])
    result = check_distribution(sampling_llm, prompt, temperature=3, num_samples=1000, batch_size=128)
    assert [test.place for test in result.tests] == [1, 2, 3]
    assert result.tests[0].num_beginnings == 1 < result.tests[1].num_beginnings < result.tests[2].num_beginnings
    assert all(test.num_samples == 1000 for test in result.tests)
    assert all(test.p_value > 1e-3 for test in result.tests)
    assert result.draft_rounds >= 1000


def test_certain_tokens_are_no_test(sampling_llm):
    """At a temperature near 0 any sampler passes."""
    prompt = EncodedPrompt(BenchPrompt("p", ""), [104, 105])
    result = check_distribution(sampling_llm, prompt, temperature=0.01, num_samples=60, batch_size=60)
    assert all(test.num_samples == 60 for test in result.tests)
    assert any(test.p_value is None and test.num_cells > 0 for test in result.tests)


def test_exact_probabilities_of_several_texts(llm):
    texts = [[1, 2, 3], [9] * 40, [7]]
    params = SamplingParams(temperature=0.7)
    together = llm.next_token_probabilities(texts, params)
    assert together.shape == (3, llm.info()["vocab_size"])
    for text, row in zip(texts, together, strict=True):
        assert torch.equal(llm.next_token_probabilities([text], params)[0], row)
        (output,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        token = output.outputs[0].token_ids[0]
        assert int(row.argmax()) == token
    assert torch.allclose(together.sum(-1), torch.ones(3))


def test_a_wrong_distribution_is_found(sampling_llm, monkeypatch):
    """Taking the draft token wherever the right method rejected it shifts the second token's distribution."""

    def greedy_for_drafts(sampler, logits, drafted, draft_probabilities):
        settlements = rejection(sampler, logits, drafted, draft_probabilities)
        return [
            s if s.num_accepted else Settlement([SampledToken(d.token_ids[0], None)], 0)
            for s, d in zip(settlements, drafted, strict=True)
        ]

    monkeypatch.setattr(verifying, "rejection", greedy_for_drafts)
    prompt = EncodedPrompt(BenchPrompt("p", ""), [104, 105])
    result = check_distribution(sampling_llm, prompt, temperature=3, num_samples=1000, batch_size=128)
    assert result.tests[0].p_value > 1e-3
    assert result.tests[1].p_value < 1e-4


def test_modes_command(command, monkeypatch):
    status, out, err = command(
        "check", "--max-tokens", "12", "--batch-size", "2", "--mode", "eager", "--mode", "compact"
    )
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[2], row[-1]) for row in rows[1:3]] == [
        ("eager", "2", "identical"),
        ("compact", "2", "identical"),
    ]
    assert "with and without speculation, in 2 combinations" in out
    arguments = ["check", "--max-tokens", "12", "--json", "--num-speculative-tokens", "2", "--mode", "all"]
    report = json.loads(command(*arguments)[1])
    assert report["identical"]
    assert report["same_in_all_modes"]
    assert report["speculation"]["num_speculative_tokens"] == 2
    modes = [(batch["mode"], batch["batch_size"]) for batch in report["batches"]]
    assert modes == [(mode, size) for mode in EXECUTION_MODES for size in (1, 8)]
    assert len({batch["digest"] for batch in report["batches"]}) == 1
    monkeypatch.setattr(CapturedPasses, "decode", lambda self, batch: flipped(Passes.decode(self, batch)))
    status, out, _ = command("check", "--max-tokens", "12", "--mode", "eager", "--mode", "masked")
    assert status == 1
    assert "with different settings" in out


def flipped(output):
    return replace(output, logits=-output.logits)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--mode", "fast"], "mode must be one of eager, graphs, compact, masked, pipeline, got 'fast'"),
        (["--mode", "compact", "--graphs", "on"], "leave out --graphs"),
        (["--mode", "compact", "--context-graph", "off"], "leave out --context-graph"),
    ],
)
def test_modes_that_cannot_be(command, arguments, part):
    status, out, err = command("check", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_progress_lines_without_a_terminal(command, monkeypatch):
    monkeypatch.setattr(bench_options, "PROGRESS_LINE_S", 0.0)
    status, _, err = command("check", "--max-tokens", "4", "--batch-size", "2")
    assert status == 0
    plain = "Decoding without speculation"
    assert err == f"{plain}: 2 of 3\n{plain}: 3 of 3\nChecking: 2 of 3\nChecking: 3 of 3\n"
    _, _, err = command("check", "--temperature", "3", "--samples", "60", "--limit", "1", "--mode", "compact")
    assert err == "Sampling compact: 32 of 60\nSampling compact: 60 of 60\n"


def test_distribution_command(command, monkeypatch):
    arguments = ["check", "--temperature", "3", "--samples", "400", "--batch-size", "16", "--limit", "1"]
    status, out, err = command(*arguments)
    assert (status, err) == (0, "")
    assert "has the target's distribution" in out
    report = json.loads(command(*arguments, "--json")[1])
    assert report["passed"]
    assert [test["place"] for test in report["tests"]] == [1, 2, 3]
    assert all(test["num_samples"] == 400 for test in report["tests"])
    assert report["speculation"]["num_speculative_tokens"] == 2
    assert all(test["p_value"] is None or 0 < test["p_value"] <= 1 for test in report["tests"])
    monkeypatch.setattr(verifying, "exact_match", wrong_at(1))
    status, out, err = command(*arguments, "--task-pipeline", "off")
    assert (status, err) == (1, "")
    assert "FAILED" in out
    assert "has NOT the target's distribution" in out


def test_prompts_without_room_for_the_tokens_that_are_sampled(command, tmp_path):
    arguments = ["check", "--temperature", "1", "--samples", "60", "--max-model-len", "20"]
    file = tmp_path / "prompts.txt"
    file.write_text("x" * 17)
    status, _, err = command(*arguments)
    assert (status, err) == (0, "")
    file.write_text("x" * 18)
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "prompt line 1 has 18 tokens" in err
    assert "room for 3 tokens of an answer in max_model_len 20" in err
