"""Calibration over several processes equals calibration in one, and stops on all if one fails.

Sums over two halves of the tokens differ from sums over all of them by float32 rounding, about 1e-7
of their size. Few weights lie that close to a border between two codes.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from folders import write_run
from models import decoder, tokens
from processes import run_processes
from safetensors.torch import load_file

from ms_compress import CompressError, DataRanks, input_importance
from ms_compress.cli import main
from ms_compress.training.checkpoint import BlockFiles

HERE = Path(__file__)


def importance(rows: int) -> dict[str, list[float]]:
    """Return the importance of each layer's inputs, from this process's share of the batches."""
    batches = torch.split(tokens(rows, 32), 2)
    with DataRanks.of_launch() as ranks:
        values = input_importance(decoder(1), ranks.share(batches), ranks=ranks)
    return {name: value.tolist() for name, value in values.items()}


def failure() -> str:
    """Return the error of this process if the second one has a token outside the vocabulary."""
    rank = int(os.environ["RANK"])
    with pytest.raises(CompressError) as error, DataRanks.of_launch() as ranks:
        input_importance(decoder(1), [tokens(2, 32) + 1000 * rank], ranks=ranks)
    return str(error.value)


def quantize(run_file: str, settings: list[str], die_after: str = "") -> int:
    """Run `ms-compress quantize`; perhaps kill the process that stores a certain layer."""
    save = BlockFiles.save

    def save_and_die(self: BlockFiles, name: str, block: torch.nn.Module) -> None:
        save(self, name, block)
        if name == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFiles, "save", save_and_die)
        return main(["quantize", run_file, *settings])


def test_statistics_of_two_processes_equal_those_of_one() -> None:
    """The processes observe two and three of five batches; both get the same sums."""
    first, second = run_processes(2, HERE, "importance", rows=10)
    assert first == second
    (alone,) = run_processes(1, HERE, "importance", rows=10)
    assert first.keys() == alone.keys()
    assert len(alone) == 7
    for name, values in alone.items():
        assert first[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["scheme=ct.int4_g32", "method=gptq", "act_order=true"],
        ["scheme=ct.nvfp4", "method=awq+gptq"],
        ["scheme=ct.w8a8", "method=smoothquant"],
        ["scheme=ct.int4_g32", "method=autoround", "iters=1"],
        ["kv_cache=fp8", "scheme=ct.fp8"],
        ["scheme=ct.int4_g32", "importance=true"],
    ],
    ids=lambda settings: settings[-1].partition("=")[2],
)
def test_a_model_quantized_by_two_processes_equals_that_of_one(
    settings: list[str], tmp_path: Path
) -> None:
    """At most one of 500 stored bytes differs; a second launch finds the run finished."""
    file = str(write_run(tmp_path))
    assert main(["quantize", file, *settings]) == 0
    elsewhere = [*settings, f"output_dir={tmp_path}/shared"]
    for _ in range(2):
        assert run_processes(2, HERE, "quantize", run_file=file, settings=elsewhere) == [0, 0]
    alone, shared = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "shared"))
    assert alone.keys() == shared.keys()
    pairs = [
        (alone[name].view(torch.uint8), shared[name].view(torch.uint8))
        for name in alone
        if alone[name].dtype in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
    ]
    differing = sum(int((first != second).sum()) for first, second in pairs)
    assert sum(first.numel() for first, _ in pairs) > 10_000
    assert differing <= sum(first.numel() for first, _ in pairs) / 500


@pytest.mark.slow
def test_a_killed_calibration_of_two_processes_resumes_with_the_same_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only from the same number of processes; the stored layers are the first process's."""
    file, settings = str(write_run(tmp_path)), ["scheme=ct.int4_g32", "method=awq+gptq"]
    killed = {"settings": settings, "die_after": "model.layers.0"}
    run_processes(2, HERE, "quantize", check=False, run_file=file, **killed)
    assert [path.name for path in (tmp_path / "out.calibration").iterdir()] == ["model.layers.0"]
    assert main(["quantize", file, *settings]) == 2
    assert "with other settings: processes is not given, was 2; " in capsys.readouterr().err
    assert run_processes(2, HERE, "quantize", run_file=file, settings=settings) == [0, 0]
    assert not (tmp_path / "out.calibration").exists()
    elsewhere = [*settings, f"output_dir={tmp_path}/uninterrupted"]
    assert run_processes(2, HERE, "quantize", run_file=file, settings=elsewhere) == [0, 0]
    weights = [tmp_path / name / "model.safetensors" for name in ("out", "uninterrupted")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_an_error_on_one_process_ends_all() -> None:
    """The other processes stop at their next exchange and report the reason."""
    first, second = run_processes(2, HERE, "failure")
    assert second.startswith("the calibration text: tokens must be 0 to 191")
    assert first.startswith(f"process 1 failed, and so nothing is exported: {second[:40]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune", "pattern=2:4"], "prune must run in one process, got 2; start it without"),
        (["distill", "layers=1"], "distill must run in one process, got 2; start it without"),
    ],
)
def test_other_commands_refuse_torchrun(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first process prints one line; the other only exits."""
    file = write_run(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert main([arguments[0], str(file), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert (message in error) is (rank == 0)
        assert error.count("\n") == 1 - rank


def test_batches_are_shared_in_their_order() -> None:
    """Every batch once, so that sums in the order of the ranks are in the order of the batches."""
    shares = [list(DataRanks(rank, 3).share(range(8))) for rank in range(3)]
    assert shares == [[0, 1], [2, 3, 4], [5, 6, 7]]
    with pytest.raises(
        ValueError, match="at least one batch for each process, got 2 batches for 3"
    ):
        DataRanks(0, 3).share(range(2))
