"""`sparkgap check` over lists of settings, on tiny models."""

import json

import pytest

from sparkgap.bench import check
from sparkgap.cli import bench_options, check_greedy, main
from sparkgap.cli.check_variants import make_variants, number_list, read_modes
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES
from sparkgap.rounds import verifying
from tests.bench.test_bench import wrong_at
from tests.speculating_model import write_looping_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("sweep"))
    return str(model), str(drafter)


@pytest.fixture
def command(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_options, "PROGRESS_LINE_S", 1e9)
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nzq\nabc\n")

    def run(*arguments, draft=("--draft", pair[1])):
        options = ["--model", pair[0], "--prompts", str(file), "--raw", "--dtype", "float32", "--threads", "1"]
        with pytest.raises(SystemExit) as exit_info:
            main(["check", "--max-tokens", "16", *arguments, *options, *draft])
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run


@pytest.fixture
def calls(monkeypatch):
    """The batch sizes of the runs without speculation, and of those that are compared."""
    plain, compared = [], []
    decode_plain, check_greedy_at = check.decode_plain, check.check_greedy

    def counted_plain(llm, prompts, *, batch_size, **settings):
        plain.append(batch_size)
        return decode_plain(llm, prompts, batch_size=batch_size, **settings)

    def counted_check(llm, prompts, *, batch_size, **settings):
        compared.append((llm.info()["speculation"]["num_speculative_tokens"], batch_size))
        return check_greedy_at(llm, prompts, batch_size=batch_size, **settings)

    monkeypatch.setattr(check, "decode_plain", counted_plain)
    monkeypatch.setattr(check, "check_greedy", counted_check)
    return plain, compared


def test_every_combination_is_a_line(command, calls):
    arguments = ("--mode", "eager,pipeline", "--num-speculative-tokens", "1,4", "--batch-size", "1,3")
    status, out, err = command(*arguments)
    assert (status, err) == (0, "")
    combinations = [(mode, n, b) for mode in ("eager", "pipeline") for n in (1, 4) for b in (1, 3)]
    lines = out.splitlines()
    assert lines[0].split() == ["mode", "N", "batch", "prompts", "tokens", "rounds", "accepted/round", "token", "ids"]
    rows = [line.split() for line in lines[1:-1]]
    assert [(row[0], int(row[1]), int(row[2])) for row in rows] == combinations
    assert {(row[3], row[-1]) for row in rows} == {("3", "identical")}
    assert lines[-1] == "identical token ids with and without speculation, in 8 combinations"
    # Plain decoding ran once, at the largest batch size.
    plain, compared = calls
    assert plain == [3]
    assert compared == [(n, b) for _, n, b in combinations]
    report = json.loads(command(*arguments, "--json")[1])
    assert (report["identical"], report["complete"], report["plain_batch_size"]) == (True, True, 3)
    found = [(b["mode"], b["num_speculative_tokens"], b["batch_size"]) for b in report["batches"]]
    assert found == combinations
    for row, batch in zip(rows, report["batches"], strict=True):
        accepted = batch["accepted_draft_tokens"] / batch["draft_rounds"]
        assert row[4:7] == [str(batch["num_tokens"]), str(batch["draft_rounds"]), f"{accepted:.2f}"]


def test_the_same_batch_decodes_plainly_each_time(command, calls):
    status, out, _ = command("--num-speculative-tokens", "2, 4", "--batch-size", "2", "--same-batch", "--json")
    assert status == 0
    # Two groups of prompts, the second of one prompt, for each of two engines.
    assert calls[0] == [2, 2, 2, 2]
    assert json.loads(out)["plain_batch_size"] is None


def test_lists_may_be_repeated_and_all_is_every_mode():
    assert read_modes(["all"]) == list(EXECUTION_MODES)
    assert read_modes(["eager", "masked,eager"]) == ["eager", "masked"]
    assert number_list("n", ["1", " 3,1", "02"]) == [1, 3, 2]
    made = make_variants(EngineOptions(), [], [4], 40)
    assert [(v.mode, v.num_speculative_tokens, v.config.max_num_seqs, v.name) for v in made] == [(None, 4, 40, "N=4")]


@pytest.mark.parametrize("plain", [(), ("--same-batch",)])
def test_a_difference_is_told_where_it_is(command, monkeypatch, plain):
    """Rounds that the host carries go wrong, those in the pipeline do not."""
    monkeypatch.setattr(verifying, "exact_match", wrong_at(4))
    arguments = ("--mode", "masked,pipeline", "--batch-size", "3", "--max-tokens", "40", *plain)
    status, out, _ = command(*arguments)
    assert status == 1
    masked, pipeline = (line for line in out.splitlines() if line.startswith(("masked", "pipeline")))
    assert pipeline.endswith("  identical")
    status, json_out, _ = command(*arguments, "--json")
    report = json.loads(json_out)
    assert (status, report["identical"], report["same_in_all_modes"]) == (1, False, False)
    differences = report["batches"][0]["differences"]
    assert not report["batches"][1]["differences"]
    first = differences[0]
    assert first["position"] >= 4
    told = f"{len(differences)} of 3 prompts differ, first {first['prompt_id']} after {first['position']} tokens"
    assert masked.endswith(told)
    assert "DIFFERENT token ids with and without speculation" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_known_survives_an_interrupt(command, monkeypatch, as_json):
    loaded = []
    load = check_greedy.loading.load_llm

    def interrupted(config):
        loaded.append(config)
        if len(loaded) == 3:
            raise KeyboardInterrupt
        return load(config)

    monkeypatch.setattr(check_greedy.loading, "load_llm", interrupted)
    lists = ("--num-speculative-tokens", "1,2,3", "--batch-size", "1,3")
    status, out, _ = command(*lists, *(("--json",) if as_json else ()))
    assert status == 130
    if as_json:
        report = json.loads(out)
        assert (report["complete"], len(report["batches"])) == (False, 4)
    else:
        assert out.count(" identical\n") == 4
        assert "interrupted after 4 of 6 combinations" in out


def test_lines_are_written_at_once(command, monkeypatch):
    told = []
    monkeypatch.setattr(check_greedy, "write_text", lambda text: told.append((len(loaded), text)))
    loaded = []
    load = check_greedy.loading.load_llm
    monkeypatch.setattr(check_greedy.loading, "load_llm", lambda config: loaded.append(config) or load(config))
    assert command("--num-speculative-tokens", "1,2", "--batch-size", "3")[0] == 0
    assert [number for number, text in told if text.endswith("identical\n")] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["--num-speculative-tokens", "1,x"],
            "num-speculative-tokens must be a number or a list such as 1,3,8, got 'x'",
        ),
        (["--num-speculative-tokens", "1,0"], "num-speculative-tokens must be at least 1, got 0"),
        (["--batch-size", "9" * 5000], "batch-size must be a number or a list such as 1,3,8"),
        (["--batch-size", "1,,3"], "batch-size must be a number or a list such as 1,3,8, got ''"),
        (["--num-speculative-tokens", "1,9,2"], "from 1 to 5"),
        (["--mode", "eager,fast"], "mode must be one of"),
        (["--mode", "all", "--speculative-config", '{"adaptive_length": true}'], "mode pipeline cannot run"),
    ],
)
def test_bad_lists_show_before_anything_runs(command, monkeypatch, arguments, part):
    monkeypatch.setattr(check_greedy.loading, "load_llm", lambda config: pytest.fail("a model was loaded"))
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_method_ngram_in_all_modes(command):
    ngram = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    status, out, _ = command("--mode", "all", "--num-speculative-tokens", "2,5", *ngram, "--json", draft=())
    assert status == 0
    assert len(json.loads(out)["batches"]) == 20


def test_lengths_that_adapt_in_the_modes_that_can(command):
    status, _, err = command("--mode", "all", "--speculative-config", '{"adaptive_length": true}')
    assert status == 2
    assert "cannot run adaptive_length; name others of eager, graphs, compact, masked" in err
