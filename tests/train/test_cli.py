"""The command refuses bad input in one line, before it loads anything."""

from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from sparkgap.cli import main
from sparkgap.train.building import head_rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss-weights", "1,2"], "loss-weights must be three numbers"),
        (["--loss-weights", "a,b,c"], "loss-weights must be numbers"),
        (["--method", "eagle"], "method must be one of dspark, dflash"),
        (["--target-layers", "4;5"], "target-layers must be numbers"),
        (["--seed", str(2**64)], "seed must be a 64-bit integer"),
        (["--method", "mtp", "--head", "gated"], "head is of dspark drafters, and a drafter of method mtp has no"),
        (["--method", "DFlash", "--markov-rank", "64"], "markov-rank is of dspark drafters"),
        (["--steps", "0"], "steps must be an integer of at least 1"),
        (["--only-prompts"], "needs a prompts file"),
        (["--target", "no-such-model", "--steps", "1"], "no-such-model"),
        (["--device", "nonsense"], "device 'nonsense' is not available"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--out", str(tmp_path / "out"), *arguments])
    assert exit_.value.code == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1]


def test_one_process_trains_in_a_directory(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    with FileLock(tmp_path / ".lock"):
        for out, message in (
            (tmp_path, f"another process trains in {tmp_path}"),
            (tmp_path / "file", "out must be a directory"),
            (tmp_path / "file" / "out", "cannot be written"),
        ):
            with pytest.raises(SystemExit) as exit_:
                main(["train", "--out", str(out)])
            assert exit_.value.code == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert message in line


def test_an_interrupted_run_says_how_it_goes_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparkgap.train.run.train", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--out", str(tmp_path)])
    assert exit_.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err.replace("\n", " ")
    assert "the same command goes on" in (tmp_path / "train.log").read_text()


def test_the_frozen_head_is_the_targets_own(tiny_target):
    ids = torch.tensor([1, 4])
    table, head = torch.randn(6, 3), torch.randn(6, 3)
    checkpoint = SimpleNamespace(weights=SimpleNamespace(get={"lm_head.weight": head}.__getitem__))

    def rows(tied: bool) -> torch.Tensor:
        target = SimpleNamespace(
            config=SimpleNamespace(tie_word_embeddings=tied),
            embedding=table,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        return head_rows(checkpoint, target, ids)

    assert torch.equal(rows(True), table[ids])
    assert torch.equal(rows(False), head[ids])
