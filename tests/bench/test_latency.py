"""The latency bench: order, arithmetic, reports and errors. Nothing here asserts a time."""

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from sparkgap import LLM, SamplingParams
from sparkgap.bench import machine, peers
from sparkgap.bench.latency import (
    EngineColumn,
    Generation,
    Turn,
    check_room,
    floor_of,
    identical,
    measure_latency,
    summarize,
    synthetic_prompt,
)
from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt
from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.cli import bench_options, latency, main
from sparkgap.errors import ConfigError, EngineError
from sparkgap.ops import NativeKernels, TorchKernels
from sparkgap.rounds import verifying
from sparkgap.rounds.pipeline.scheduling import RoundCosts
from tests.bench.test_bench import wrong_at
from tests.speculating_model import write_looping_pair, write_mtp

SETTINGS = {"dtype": "float32", "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("latency"))
    return str(model), str(drafter)


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    monkeypatch.setattr(bench_options, "PROGRESS_LINE_S", 1e9)


@pytest.fixture
def command(pair, tmp_path, capsys, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nzq\n")
    monkeypatch.setattr(machine, "READ_BUFFER_BYTES", 2**21)

    def run(*arguments, drafter=pair[1], prompts=True):
        options = ["--model", pair[0], "--raw", "--dtype", "float32", "--threads", "1"]
        options += ["--prompts", str(file)] if prompts else []
        options += ["--draft", drafter] if drafter else []
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", "latency", *options, *arguments])
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run


class FakeColumn:
    """Takes a fixed time on a clock that it shares."""

    def __init__(self, name, clock, log, token_ms):
        self.name, self.clock, self.log, self.token_ms = name, clock, log, token_ms

    def generate(self, token_ids, num_tokens):
        start = self.clock[0]
        self.log.append((self.name, tuple(token_ids), start))
        self.clock[0] += num_tokens * self.token_ms
        return Generation(list(range(num_tokens)), self.token_ms, self.clock[0] - start)


def test_columns_take_turns():
    clock, log, pauses, done = [0.0], [], [], []
    columns = [FakeColumn(name, clock, log, ms) for name, ms in (("plain", 4.0), ("b", 2.0), ("c", 8.0))]
    prompts = [EncodedPrompt(BenchPrompt(name, ""), [number]) for number, name in enumerate("xy")]

    def read():
        log.append("read")
        return 1e9 + clock[0]

    turns = measure_latency(
        columns,
        prompts,
        num_tokens=5,
        repeats=3,
        warmups=2,
        read_bandwidth=read,
        pause=pauses.append,
        advance=done.append,
    )
    order = [entry if entry == "read" else entry[:2] for entry in log]
    turn = [["read", ("plain", (p,)), ("b", (p,)), ("c", (p,))] for p in range(2)]
    assert order == (turn[0] + turn[1]) * 5
    assert [entry[2] for entry in log[1:4]] == [0, 20, 30]
    assert len(pauses) == 5 * 2 * 3
    assert sum(done) == 10
    assert [(turn.prompt_id, turn.repeat) for turn in turns] == [(p, r) for r in range(3) for p in "xy"]
    # The first measured turn follows two warm-up repeats of two turns, of 70 ms each.
    assert turns[0].read_bytes_per_s == 1e9 + 4 * 70
    assert [turns[0].generations[name].latency_ms for name in ("plain", "b", "c")] == [20, 10, 40]


def test_an_answer_of_the_wrong_length_is_refused():
    class Short(FakeColumn):
        def generate(self, token_ids, num_tokens):
            return super().generate(token_ids, num_tokens - 1)

    with pytest.raises(RuntimeError, match="plain gave 4 tokens, not 5"):
        measure_latency(
            [Short("plain", [0.0], [], 1.0)],
            [EncodedPrompt(BenchPrompt("x", ""), [1])],
            num_tokens=5,
            repeats=1,
            warmups=0,
            read_bandwidth=lambda: 1.0,
            pause=lambda seconds: None,
        )


def turn(prompt, repeat, bandwidth=1e9, **columns):
    return Turn(prompt, repeat, bandwidth, columns)


def test_figures():
    turns = [
        turn("x", 0, 2e9, plain=Generation([1, 2, 3], 10, 30), speculative=Generation([1, 2, 3], 12, 20, 2, 3, 10)),
        turn("x", 1, 4e9, plain=Generation([1, 2, 3], 20, 60), speculative=Generation([1, 2, 3], 10, 20, 2, 1, 10)),
        turn("x", 2, 1e9, plain=Generation([1, 2, 3], 40, 50), speculative=Generation([1, 2, 9], 20, 50, 1, 1, 4)),
    ]
    summaries = summarize(turns, 8_000_000)
    plain, other = summaries["plain"], summaries["speculative"]
    assert (plain.ttft_ms.median, plain.ttft_ms.lowest, plain.ttft_ms.highest) == (20, 10, 40)
    assert (plain.tpot_ms.median, plain.tpot_ms.lowest, plain.tpot_ms.highest) == (10, 5, 20)
    assert plain.latency_ms.median == 50
    assert plain.output_tokens_per_s.highest == pytest.approx(100)
    # Time per token over the turn's own floor: 10 / 4, 20 / 2, 5 / 8.
    floors = plain.times_floor
    assert (floors.median, floors.lowest, floors.highest) == pytest.approx((2.5, 0.625, 10))
    assert other.times_floor is None
    assert (other.draft_rounds, other.accepted_per_round, plain.accepted_per_round) == (5, 1.0, None)
    assert (plain.per_request, plain.acceptance_rate) == (None, None)
    assert other.per_request == pytest.approx(
        {"draft_rounds": 5 / 3, "draft_tokens": 8, "accepted_draft_tokens": 5 / 3}
    )
    assert other.acceptance_rate == pytest.approx((0.3 + 0.1 + 0.25) / 3)
    speedup = other.speedup_over["plain"]
    assert (speedup.ttft.lowest, speedup.ttft.median, speedup.ttft.highest) == pytest.approx((10 / 12, 2, 2))
    assert (speedup.tpot.lowest, speedup.tpot.median, speedup.tpot.highest) == pytest.approx((1 / 3, 2.5, 4))
    assert (speedup.latency.lowest, speedup.latency.median, speedup.latency.highest) == pytest.approx((1, 1.5, 3))
    assert set(other.speedup_over) == {"plain"}
    assert (plain.answers, plain.same_answers, other.same_answers) == (3, 3, 2)
    assert (plain.same_leading_tokens.lowest, other.same_leading_tokens.lowest) == (3, 2)
    assert identical(summaries) is False
    assert identical(summarize(turns[:2], 1)) is True
    assert identical({"plain": plain}) is None
    assert identical({"plain": plain, "a": plain, "b": other}, ["a", "b"]) is False
    assert identical({"plain": plain, "a": plain, "b": other}, ["a"]) is True
    floor = floor_of(turns, 8_000_000)
    assert (floor.tpot_ms, floor.read_bytes_per_s.median) == pytest.approx((4, 2e9))


def test_plain_that_changes_between_repeats_is_not_identical():
    answers = [Generation([1, 2], 1, 2), Generation([1, 3], 1, 2)]
    turns = [turn("x", repeat, plain=answer, speculative=answer) for repeat, answer in enumerate(answers)]
    assert identical(summarize(turns, 1)) is False


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_machine_that_drifts_changes_no_speedup(drift):
    def turns(factors):
        return [
            turn(
                "x",
                repeat,
                plain=Generation([1, 2, 3], 10.0 * factor, (30.0 + repeat) * factor),
                peer=Generation([1, 2, 3], 7.0 * factor, 95.0 * factor),
            )
            for repeat, factor in enumerate(factors)
        ]

    steady, drifting = (summarize(turns(f), 1)["peer"].speedup_over["plain"] for f in ([1, 1, 1], drift))
    for part in ("ttft", "tpot", "latency"):
        expected, found = getattr(steady, part), getattr(drifting, part)
        assert (found.median, found.lowest, found.highest) == pytest.approx(
            (expected.median, expected.lowest, expected.highest)
        )


def test_engine_columns(pair):
    plain = EngineColumn(LLM(pair[0], speculation=False, **SETTINGS))
    other = EngineColumn(LLM(pair[0], speculative_config={"model": pair[1]}, **SETTINGS))
    assert (plain.name, other.name) == ("plain", "speculative")
    a, b = plain.generate([104, 105], 90), other.generate([104, 105], 90)
    assert a.token_ids == b.token_ids
    assert len(a.token_ids) == 90
    assert a.draft_rounds == 0
    assert 0 < b.draft_rounds < 90
    assert b.accepted_draft_tokens > 0
    assert 0 < a.ttft_ms < a.latency_ms
    assert other.facts["speculation"]["num_speculative_tokens"] == 5


def test_every_answer_computes_its_prompt(pair):
    column = EngineColumn(LLM(pair[0], speculation=False, enable_prefix_caching=True, **SETTINGS))
    computed = []
    prefill = column._llm._engine.runner.prefill

    def count(chunks):
        computed.append(sum(chunk.end - chunk.sequence.num_computed_tokens for chunk in chunks))
        return prefill(chunks)

    column._llm._engine.runner.prefill = count
    for _ in range(3):
        column.generate(list(range(60)), 2)
    assert computed == [60, 60, 60]


def test_synthetic_prompt_and_room(pair):
    llm = LLM(pair[0], speculation=False, **SETTINGS)
    for number in (1, 77, 5000):
        prompt = synthetic_prompt(llm, number)
        assert len(prompt.token_ids) == number
        assert prompt.token_ids[0] == synthetic_prompt(llm, 1).token_ids[0]
    prompts = [synthetic_prompt(llm, 100)]
    check_room(prompts, 28, 128)
    with pytest.raises(ConfigError, match="29 output tokens do not fit in max_model_len 128"):
        check_room(prompts, 29, 128)


@pytest.mark.parametrize("bias", [False, True])
def test_bytes_of_weights(bias):
    weight, offset = torch.randn(24, 20), torch.randn(24) if bias else None
    for quantization, dtype, per_row in (
        ("w8a8", torch.bfloat16, 28),
        (None, torch.bfloat16, 40),
        (None, torch.float32, 80),
    ):
        prepared = NativeKernels(1, quantization).prepare_linear(weight.to(dtype), offset)
        assert prepared.nbytes == 24 * (per_row + 4 * bias)
    assert TorchKernels().prepare_linear(weight, offset).nbytes == 24 * (80 + 4 * bias)


def test_bytes_of_a_token_are_those_of_the_checkpoint(pair):
    """Everything but the embedding's other rows; the head is a tensor of its own here."""
    weights = open_checkpoint(pair[0]).weights
    tensors = {name: weights.get(name) for name in weights.names()}
    expected = sum(tensor.numel() for name, tensor in tensors.items() if "embed" not in name) + 32
    info = LLM(pair[0], speculation=False, dtype="float32", threads=1).info()
    assert info["weight_bytes_per_token"] == 4 * expected


def test_memory_reader_leaves_torchs_threads_alone():
    before = torch.get_num_threads()
    reader = machine.MemoryReader(torch.device("cpu"), before + 1, 2**21)
    assert reader.buffer_bytes == 2**21
    assert reader.bytes_per_s() > 0
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), machine.torch_threads(before + 1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_transformers_peer_is_greedy_past_the_end_of_sequence(pair, tmp_path):
    def stock(directory):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        ids = torch.tensor([[104, 105]])
        return model.generate(ids, max_new_tokens=12, do_sample=False)[0, 2:].tolist()

    expected = stock(pair[0])
    assert len(expected) == 12
    # The same weights, with a token of the answer as end of sequence.
    directory = tmp_path / "ending"
    shutil.copytree(pair[0], directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"eos_token_id": expected[2]}))
    assert len(stock(directory)) <= 3
    peer = peers.load_peer("transformers", open_checkpoint(str(directory)), threads=1, max_tokens=128)
    generation = peer.generate([104, 105], 12)
    assert generation.token_ids == expected
    assert 0 < generation.ttft_ms < generation.latency_ms
    assert peer.facts == {"version": transformers.__version__, "dtype": "bfloat16"}


class FakeLlama:
    """Counts up for ever from the prompt's last token."""

    def __init__(self, path, **settings):
        self.path, self.settings, self.calls = path, settings, []
        self.metadata = {"general.file_type": "3"}

    def reset(self):
        self.calls.append("reset")

    def generate(self, token_ids, **settings):
        self.calls.append((token_ids, settings))
        token = token_ids[-1]
        try:
            while True:
                token += 1
                yield token
        finally:
            self.calls.append("closed")


@pytest.fixture
def llama_cpp(monkeypatch):
    module = ModuleType("llama_cpp")
    module.__spec__ = ModuleSpec("llama_cpp", None)
    module.Llama = FakeLlama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(peers, "version", lambda package: "1.2.3")


def test_llama_cpp_peer(llama_cpp, pair):
    checkpoint = open_checkpoint(pair[0])
    peer = peers.LlamaCppPeer(checkpoint, threads=3, max_tokens=77)
    assert peer.facts == {"version": "1.2.3", "weights": "Q4_1"}
    model = peer._model
    assert model.path == str(checkpoint.path)
    settings = model.settings
    assert (settings["n_ctx"], settings["n_threads"], settings["n_threads_batch"]) == (77, 3, 3)
    for _ in range(2):
        assert peer.generate([5, 9], 4).token_ids == [10, 11, 12, 13]
    one = ["reset", ([5, 9], {"temp": 0.0, "repeat_penalty": 1.0}), "closed"]
    assert model.calls == one * 2


@pytest.mark.slow
@pytest.mark.model
def test_llama_cpp_itself(default_model_path):
    pytest.importorskip("llama_cpp")
    checkpoint = open_checkpoint(str(default_model_path))
    peer = peers.load_peer("llama.cpp", checkpoint, threads=1, max_tokens=40)
    prompt = checkpoint.tokenizer.encode("The capital of France is")
    generation = peer.generate(prompt, 6)
    assert "Paris" in checkpoint.tokenizer.decode(generation.token_ids)
    assert peer.generate(prompt, 6).token_ids == generation.token_ids
    llm = LLM(str(default_model_path), dtype="float32", threads=1)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids[:4] == generation.token_ids[:4]


def test_timed_generation():
    assert peers.timed_generation([7, 8, 9], [1.5, 1.7, 2.0], 1.0) == Generation([7, 8, 9], 500, 1000)
    assert Generation([7, 8, 9], 500, 1000).tpot_ms == 250
    with pytest.raises(RuntimeError, match="2 tokens came at 1 times"):
        peers.timed_generation([7, 8], [1.5], 1.0)


def test_command(command, monkeypatch):
    arguments = ["--max-tokens", "20", "--repeats", "2", "--peer", "transformers", "--peer", "transformers"]
    status, out, err = command(*arguments, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report["columns"]) == ["plain", "speculative", "transformers"]
    assert report["identical"] is True
    assert [prompt["tokens"] for prompt in report["prompts"]] == [5, 2]
    assert [(turn["prompt"], turn["repeat"]) for turn in report["turns"]] == [
        (prompt, repeat) for repeat in range(2) for prompt in ("line 1", "line 2")
    ]
    assert all(list(turn["columns"]) == list(report["columns"]) for turn in report["turns"])
    plain, other = report["columns"]["plain"], report["columns"]["speculative"]
    assert plain["speculation"] is None
    assert other["accepted_per_round"] > 0
    assert set(other["speedup_over"]) == {"plain", "transformers"}
    times = [turn["columns"]["plain"]["latency_ms"] for turn in report["turns"]]
    assert plain["latency_ms"] == {
        "median": pytest.approx(sum(sorted(times)[1:3]) / 2),
        "lowest": min(times),
        "highest": max(times),
    }
    assert report["machine"]["threads"] == 1
    assert report["machine"]["cpu"]
    assert report["machine"]["instruction_set"] in ("avx512", "avx2", "portable")
    assert set(report["machine"]["versions"]) == {"sparkgap", "python", "torch"}
    assert report["columns"]["transformers"]["version"] == transformers.__version__
    assert report["floor"]["weight_bytes_per_token"] > 0
    status, out, err = command("--max-tokens", "20", "--repeats", "1", "--warmups", "0", "--also-dtype", "bfloat16")
    assert (status, err) == (0, "")
    assert "plain bfloat16" in out
    for part in ("TTFT", "TPOT", "speculative", "speculative / plain", "the same as those without", "GB/s"):
        assert part in " ".join(out.split())
    monkeypatch.setattr(verifying, "exact_match", wrong_at(4))
    status, out, _ = command("--max-tokens", "20", "--repeats", "1", "--warmups", "0", "--task-pipeline", "off")
    assert status == 1
    assert "DIFFERENT" in out


@pytest.mark.parametrize("arguments", [[], ["--mode", "eager", "--mode", "compact"]])
def test_matrix(command, monkeypatch, arguments):
    monkeypatch.setattr(latency, "_PHASE_REPEATS", 2)
    modes = arguments[1::2] or list(latency.MATRIX_MODES)
    status, out, err = command(
        "--matrix", "--max-tokens", "20", "--repeats", "1", "--prompt-tokens", "60", "--json", *arguments, prompts=False
    )
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report["columns"]) == ["plain", *modes]
    assert report["identical"] is True
    assert (report["warmups"], report["phase_context_tokens"]) == (2, 60)
    plain, *others = report["columns"].values()
    assert set(plain["phases_ms"]) == {"decode", "round"}
    assert any("whole rounds of plain" in note for note in report["notes"])
    for mode, column in zip(modes, others, strict=True):
        assert set(column["phases_ms"]) == {"decode", "verify", "draft", "context", "round"}
        assert all(0 < phase["lowest"] <= phase["median"] for phase in column["phases_ms"].values())
        assert column["per_request"]["draft_tokens"] == 5 * column["per_request"]["draft_rounds"]
        assert column["acceptance_rate"] > 0
        counts = column["graph_counts"]
        assert counts["captures_since_startup"] == 0
        assert (counts["captures_at_startup"] > 0) == (mode != "eager")
        assert (counts["replays"]["context"] > 0) == (mode in ("compact", "masked", "pipeline"))


def test_matrix_shows_the_pipeline_with_and_without_a_choice_of_lengths(command, monkeypatch, tmp_path):
    monkeypatch.setattr(latency, "_PHASE_REPEATS", 1)
    model, drafter = write_looping_pair(tmp_path, confidences=True)
    config = json.dumps({"model": str(drafter), "prefix_scheduling": True})
    arguments = ["--matrix", "--max-tokens", "12", "--repeats", "1", "--warmups", "0", "--prompt-tokens", "20"]
    arguments += ["--model", str(model), "--speculative-config", config, "--json"]
    monkeypatch.setattr(
        RoundCosts, "measure", lambda costs, bucket, *_: costs.of(bucket).copy_(torch.tensor([1.0, 1e9, 1e9, 1e9]))
    )
    monkeypatch.setattr(RoundCosts, "measure_growth", lambda *_: None)
    # The other modes cannot choose, and verify all.
    status, out, err = command(*arguments, drafter=None, prompts=False)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report["columns"]) == ["plain", *latency.MATRIX_MODES, latency.ALL_DRAFTS]
    assert report["identical"] is True
    chosen, every = report["columns"]["pipeline"], report["columns"][latency.ALL_DRAFTS]
    graphs = report["columns"]["graphs"]
    assert every["per_request"] == graphs["per_request"]
    assert every["per_request"]["draft_tokens"] == 5 * every["per_request"]["draft_rounds"]
    assert chosen["per_request"]["draft_tokens"] == chosen["per_request"]["draft_rounds"]


def test_matrix_with_an_mtp_drafter(command, pair, monkeypatch, tmp_path):
    monkeypatch.setattr(latency, "_PHASE_REPEATS", 1)
    drafter = write_mtp(tmp_path / "mtp", Path(pair[0]), "right")
    arguments = ["--max-tokens", "12", "--repeats", "1", "--warmups", "0", "--mtp", str(drafter)]
    status, out, err = command("--matrix", "--mode", "pipeline", *arguments, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report["columns"]) == ["plain", "pipeline", "MTP-3 + pipeline"]
    assert report["identical"] is True
    column = report["columns"]["MTP-3 + pipeline"]
    assert column["per_request"]["draft_tokens"] == 3 * column["per_request"]["draft_rounds"]
    assert column["acceptance_rate"] > 0.5
    assert set(column["phases_ms"]) == {"decode", "verify", "draft", "context", "round"}
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert "--mtp is one more column of --matrix" in err
    status, out, err = command("--matrix", "--mtp", str(pair[1]))
    assert (status, out) == (2, "")
    assert "method is mtp, and drafter" in err


def test_matrix_in_markdown(command, monkeypatch):
    monkeypatch.setattr(latency, "_PHASE_REPEATS", 1)
    arguments = ["--matrix", "--max-tokens", "8", "--repeats", "1", "--warmups", "0", "--mode", "masked"]
    status, out, err = command(*arguments, "--markdown")
    assert (status, err) == (0, "")
    tables = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    assert [table[0].count("|") for table in tables] == [4, 4, 4, 5]
    for table in tables:
        assert table[1].startswith("| --- | ---: |")
        assert len({line.count("|") for line in table}) == 1
    labels = [line.split("|")[1].strip() for table in tables for line in table]
    for label in (
        "TTFT, ms", "accepted draft tokens / request", "draft tokens / request", "draft rounds / request",
        "accepted / round", "acceptance rate", "verification pass", "whole round, ms", "masked / plain",
    ):  # fmt: skip
        assert label in labels
    status, out, _ = command(*arguments)
    assert status == 0
    assert "…" not in out


def test_matrix_without_a_drafter(command):
    for arguments, part in (([], "--draft DIR"), (["--no-speculation"], "leave out --no-speculation")):
        status, out, err = command("--matrix", *arguments, drafter=None)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert part in err


def test_matrix_asks_for_the_seeds_prompt(command, monkeypatch):
    """And for its numbers of tokens, warm-ups and measured requests, all columns in turn."""
    given = {}

    def measure(columns, encoded, **settings):
        given.update(settings, columns=[column.name for column in columns], prompts=len(encoded))
        raise ConfigError("enough is known")

    monkeypatch.setattr("sparkgap.bench.latency.check_room", lambda *_: None)
    monkeypatch.setattr("sparkgap.bench.latency.measure_latency", measure)
    status, _, err = command("--matrix", prompts=False)
    assert (status, "enough is known" in err) == (2, True)
    assert (given["num_tokens"], given["warmups"], given["repeats"], given["prompts"]) == (128, 2, 5, 1)
    assert given["columns"] == ["plain", *latency.MATRIX_MODES]
    monkeypatch.undo()
    status, out, err = command("--matrix", prompts=False)
    assert (status, out) == (2, "")
    assert "prompt 1868 tokens has 1868 tokens" in err


def test_phases_without_room_are_left_out(command):
    arguments = ["--matrix", "--mode", "masked", "--max-tokens", "3", "--repeats", "1", "--warmups", "0"]
    status, out, _ = command(*arguments, "--prompt-tokens", "125", "--json", prompts=False)
    report = json.loads(out)
    assert (status, report["identical"]) == (0, True)
    assert "phases_ms" not in report["columns"]["masked"]
    assert any("no room for a round after 125 tokens" in note for note in report["notes"])


def test_phases_need_room_and_quiet(pair):
    llm = LLM(pair[0], speculative_config={"model": pair[1]}, **SETTINGS)
    free = llm._engine.scheduler.blocks.num_free_blocks
    for context in (1, 60, 122):
        assert min(llm.time_phases(context, 3).values()) > 0
    with pytest.raises(ConfigError, match="no room for a round after 123 tokens"):
        llm.time_phases(123, 1)
    assert llm._engine.scheduler.blocks.num_free_blocks == free
    expected = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20))[0].outputs
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=20))
    next(stream)
    with pytest.raises(EngineError, match="no request is running"):
        llm.time_phases(10, 1)
    stream.close()
    llm.time_phases(10, 1)
    assert llm.generate("hello", SamplingParams(temperature=0, max_tokens=20))[0].outputs == expected


def test_a_whole_round_of_the_pipeline_is_chained_on_the_device(pair, monkeypatch):
    config = {"model": pair[1], "prompt_lookup_max": 3}
    llm = LLM(pair[0], speculative_config=config, task_pipeline="on", **SETTINGS)
    runner = llm._engine._pipelined
    starts, submit = [], runner.pipeline.submit

    def watched(sequences):
        submit(sequences)
        slot = runner.pipeline.slots[runner.pipeline.rounds[-1].slot]
        starts.append((len(runner.pipeline.rounds), int(slot._sources[0]), int(slot._staged_positions[0])))

    monkeypatch.setattr(runner.pipeline, "submit", watched)
    monkeypatch.setattr(runner.direct, "decode", lambda _: pytest.fail("the host carried the round"))
    free = llm._engine.scheduler.blocks.num_free_blocks
    assert llm.time_phases(60, 3)["round"] > 0
    assert starts == [(1, -1, 60), (2, -1, 60), (2, -1, 60)]
    assert not runner.pipeline.rounds
    assert len(runner.pipeline.texts._free) == runner.pipeline.texts.count
    assert llm._engine.scheduler.blocks.num_free_blocks == free
    assert llm.graph_counts()["captures_since_startup"] == 0


def test_command_without_a_drafter(command):
    arguments = ["--max-tokens", "4", "--repeats", "1", "--json", "--prompt-tokens", "30"]
    for more, reason in (([], "no drafter was named"), (["--no-speculation"], "--no-speculation")):
        status, out, err = command(*arguments, *more, drafter=None, prompts=False)
        report = json.loads(out)
        assert (status, err) == (0, "")
        assert list(report["columns"]) == ["plain"]
        assert report["prompts"] == [{"id": "30 tokens", "tokens": 30}]
        assert report["identical"] is None
        assert any(reason in note for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-tokens", "1"], "max-tokens must be at least 2"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--warmups", "-1"], "warmups must not be negative"),
        (["--prompt-tokens", "0"], "prompt-tokens must be at least 1"),
        (["--prompt-tokens", "9"], "leave out --prompts"),
        (["--max-tokens", "124"], "prompt line 1 has 5 tokens, and 124 output tokens do not fit in max_model_len 128"),
        (["--peer", "vllm"], "peer must be one of transformers, llama.cpp, got 'vllm'"),
        (["--also-dtype", "int3"], "dtype"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--mode", "compact"], "--mode chooses columns of --matrix"),
        (["--matrix", "--mode", "fast"], "mode must be one of eager, graphs, compact, masked, pipeline, got 'fast'"),
        (["--matrix", "--graphs", "on"], "leave out --graphs"),
        (["--markdown", "--json"], "contradict"),
    ],
)
def test_bad_input(command, arguments, part):
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_a_missing_peer_names_the_extra(command, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    for peer in peers.PEERS:
        status, out, err = command("--peer", peer)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "pip install 'sparkgap[bench]'" in err


def test_peers_that_cannot_load(command, llama_cpp, monkeypatch):
    status, out, err = command("--max-tokens", "4", "--peer", "llama.cpp")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "reads .gguf files" in err
    monkeypatch.setattr(peers, "available_memory_bytes", lambda device: 1000)
    status, out, err = command("--max-tokens", "4", "--peer", "transformers")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "measure it alone" in err
