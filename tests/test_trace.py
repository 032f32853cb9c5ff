"""Recordings of real requests on a tiny model."""

import json
from pathlib import Path

import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.bench.trace.chrome import trace_events
from sparkgap.bench.trace.intervals import interval_reports
from sparkgap.bench.trace.rounds import find_rounds
from sparkgap.cli import main
from sparkgap.config import EXECUTION_MODES
from sparkgap.errors import ConfigError, EngineError

from .bench.trace.event_format import check_events
from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 2}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, skip_reading_prefix_cache=True)
PROMPT = [5, 6, 7]
DRAFT_LAYERS = 2


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("trace"))
    return str(model), str(drafter)


@pytest.fixture(scope="module", params=EXECUTION_MODES)
def llm(request: pytest.FixtureRequest, paths: tuple[str, str]) -> LLM:
    config = {"model": paths[1], "num_speculative_tokens": 3, "prompt_lookup_max": 0}
    return LLM(paths[0], speculative_config=config, **SETTINGS, **EXECUTION_MODES[request.param])


def tokens(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def watched(llm: LLM) -> list[object]:
    """What methods were replaced in the engine's objects."""
    loaded = llm._loaded
    objects: list[object] = [loaded.engine, loaded.passes, loaded.engine.runner, loaded.passes.drafting.drafter]
    if loaded.pipeline is not None:
        pipeline = loaded.pipeline.pipeline
        objects += [loaded.pipeline.direct, pipeline, pipeline.stream, *pipeline.slots]
    return [name for thing in objects for name, value in vars(thing).items() if hasattr(value, "__wrapped__")]


def test_every_round_has_its_stages_and_no_token_changes(llm: LLM) -> None:
    plain = tokens(llm)
    assert watched(llm) == []
    with llm.trace() as recording:
        assert watched(llm)
        traced = tokens(llm)
    with llm.trace(torch_operations=True) as counted:
        again = tokens(llm)
    assert watched(llm) == []
    assert plain == traced == again == tokens(llm)
    rounds = find_rounds(recording)
    metrics = llm.generate([PROMPT], PARAMS)[0].metrics
    assert metrics is not None
    is_pipelined = llm.info()["task_pipeline"]["active"]
    # The pipeline may have one more in flight when the last token is known.
    assert 0 <= len(rounds) - metrics.draft_rounds <= (2 if is_pipelined else 0)
    has_graphs = llm.info()["graphs"] is not None
    has_context_graph = has_graphs and llm.info()["graphs"]["context_graph"] != "off"
    for round_ in rounds:
        assert {"draft", "target", "context"} < set(round_.stages) | {"settle"}
        runs = {stage: {(call.run, call.part) for call in calls} for stage, calls in round_.stages.items()}
        if has_graphs:
            assert len(runs["draft"]) == len(runs["target"]) == 1
        assert (len(runs["context"]) == 1) == has_context_graph
        order = [round_.envelope(stage) for stage in ("draft", "target", "context")]
        assert order[0].end_ns <= order[1].begin_ns <= order[1].end_ns <= round_.verification_ns
        assert round_.verification_ns <= order[2].begin_ns
        assert (round_.slot is not None) == is_pipelined
        if is_pipelined:
            assert len(runs["settle"]) == len(runs["begin"]) == len(runs["lay out"]) == len(runs["hand off"]) == 1
            assert {call.run for calls in round_.stages.values() for call in calls} == {round_.pipelined.run}
    if is_pipelined:
        assert [round_.slot for round_ in rounds] == [rounds[0].slot ^ (number % 2) for number in range(len(rounds))]
    report = interval_reports({"mode": (recording, counted)})["mode"]
    assert report.drafted
    assert report.intervals["context_graphs"].median == (1 if has_context_graph else 0)
    assert report.intervals["context_kv_writes"].median == DRAFT_LAYERS
    for name in ("draft_ms", "target_ms", "round_ms", "verification_to_next_ms", "projection_to_last_write_ms"):
        assert 0 < report.intervals[name].lower < report.intervals["round_ms"].upper + 1e-9
    assert (report.host_calls["other_operations"] > 5) == (not is_pipelined)
    events = trace_events(recording, "mode")
    check_events(events)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == len(rounds)


def test_nothing_is_kept_of_requests_outside_a_recording(llm: LLM) -> None:
    with llm.trace() as recording:
        pass
    tokens(llm)
    assert recording.kernels == []
    assert [call for call in recording.host if call.name != "step"] == []


def test_a_recording_excludes_another(llm: LLM) -> None:
    with llm.trace(), pytest.raises(EngineError, match="records one at a time"), llm.trace():
        pass
    assert watched(llm) == []


def test_an_exception_ends_the_recording(llm: LLM) -> None:
    def fail() -> None:
        with llm.trace():
            raise KeyError("something of the caller's")

    with pytest.raises(KeyError):
        fail()
    assert watched(llm) == []
    with llm.trace() as recording:
        tokens(llm)
    assert recording.kernels


def test_plain_decoding_is_traced_too(paths: tuple[str, str]) -> None:
    for mode in ("graphs", "pipeline"):
        llm = LLM(paths[0], speculation=False, **SETTINGS, **EXECUTION_MODES[mode])
        with llm.trace() as recording:
            tokens(llm)
        rounds = find_rounds(recording)
        assert 23 <= len(rounds) <= 25
        assert not {"draft", "context"} & {stage for round_ in rounds for stage in round_.stages}
        report = interval_reports({"mode": (recording, recording)})["mode"]
        assert not report.drafted
        assert report.intervals["draft_ms"] is None
        assert report.intervals["round_ms"] is not None


def test_torch_kernels_are_refused(paths: tuple[str, str]) -> None:
    llm = LLM(paths[0], speculation=False, dtype="float16", **SETTINGS)
    with pytest.raises(ConfigError, match="native kernels"), llm.trace():
        pass


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def options(paths: tuple[str, str]) -> list[str]:
    # What is looked up makes rounds of another kind, and an answer that loops has little else.
    drafts = ["--draft", paths[1], "--speculative-config", '{"prompt_lookup_max": 0}']
    limits = "--max-model-len 96 --max-num-seqs 1 --threads 1 --ignore-eos --max-tokens 40"
    return ["hello", "--raw", "--model", paths[0], *drafts, *limits.split()]


def test_the_command_compares_modes(paths: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    status, out, err = run(capsys, *options(paths), "--compare", "--output", str(path), "--json")
    assert status == 0, err
    report = json.loads(out)
    assert list(report["modes"]) == ["graphs", "compact", "masked", "pipeline"]
    assert report["same_tokens"]
    for mode in report["modes"].values():
        assert mode["captures_while_traced"] == mode["dropped_kernel_calls"] == 0
        assert mode["completion_tokens"] == 40
    document = json.loads(path.read_text())
    check_events(document["traceEvents"])
    assert document["otherData"]["speculation"]["num_speculative_tokens"] == 5


def test_the_command_traces_the_mode_that_options_choose(
    paths: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    command = [*options(paths), "--task-pipeline", "off", "--context-graph", "compact", "--output", str(path)]
    status, out, err = run(capsys, *command)
    assert status == 0, err
    assert "compact" in out
    assert "draft envelope, ms" in out
    assert str(path) in err.replace("\n", "")
    assert path.exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--output", "missing/trace.json"], "there is no directory missing"),
        (["--output", "."], "it is a directory; name a file"),
        (["--max-tokens", "2"], "raise --max-tokens"),
        (["--mode", "fast"], "mode must be one of"),
        (["--compare", "--graphs", "on"], "leave out --graphs"),
        (["--system", "Be brief."], "one of them"),
    ],
)
def test_bad_input_is_one_line(
    paths: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *options(paths), *extra)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
