"""Calls in a separate process exchange typed records and nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError, ParallelError
from ms_parallel.planner import subprocess_call
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.record.history import History
from ms_parallel.planner.refusal import REFUSAL, LayoutArguments
from ms_parallel.planner.subprocess_call import CALL, RESULT, call_in_subprocess
from ms_parallel.schedules import one_f_one_b
from ms_parallel.training.options import Options
from ms_parallel.training.planning.subprocesses import PlanArguments, RunRecord, ask_memory

ARGUMENTS = LayoutArguments(model="llama", layout=Layout(tensor=3), options={})


class _Trap:
    """A value whose unpickling has a side effect."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_output_of_the_process_does_not_disturb_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may print to standard output when it is imported."""
    (tmp_path / "sitecustomize.py").write_text("print('a line')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "tensor=3 does not divide" in call_in_subprocess(REFUSAL, ARGUMENTS, str | None)


@pytest.mark.parametrize(
    ("settings", "layout", "error", "message"),
    [
        ({"batch_size": 9}, Layout(data=2), ConfigError, "batch_size=9 does not divide over"),
        pytest.param(
            *({"sequence_length": 510}, Layout(tensor=3), LayoutError, "tensor=3 does not divide"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_keeps_its_class_and_message(
    settings: dict[str, Any], layout: Layout, error: type[ParallelError], message: str
) -> None:
    """With its class, which determines the exit code, and its message."""
    with pytest.raises(error, match=message) as raised:
        ask_memory(Options("llama", device="cpu", **settings), layout, None, None)
    assert type(raised.value) is error


def test_a_failed_process_reports_the_reason() -> None:
    """With its last error, such as a missing function or a function of another package."""
    with pytest.raises(ParallelError, match=r"nowhere:no ended without a result: ModuleNotFound"):
        call_in_subprocess("ms_parallel.nowhere:no", ARGUMENTS, str)
    for foreign in ("builtins:print", "os:system", "ms_parallel_other.module:function"):
        with pytest.raises(ParallelError, match="is not a function of ms_parallel"):
            call_in_subprocess(foreign, ARGUMENTS, str)


def test_an_answer_of_a_wrong_type_is_refused() -> None:
    """It is validated against the expected type."""
    with pytest.raises(ParallelError, match=r"refusal:refusal: Expected `int`, got `str`"):
        call_in_subprocess(REFUSAL, ARGUMENTS, int)


def test_no_pickle_is_read_on_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle instead of a record is refused and not executed."""
    import pickle

    trap = tmp_path / "trapped"
    pickled = pickle.dumps(_Trap(trap))
    (tmp_path / CALL).write_bytes(pickled)
    process = subprocess.run(
        [sys.executable, "-c", subprocess_call.PROGRAM, str(tmp_path)],
        capture_output=True,
        check=False,
    )
    assert process.returncode
    assert b"ParallelError: a call: " in process.stderr
    assert not (tmp_path / RESULT).exists()
    program = f"import sys; open(sys.argv[1] + '/{RESULT}', 'wb').write({pickled!r})"
    monkeypatch.setattr(subprocess_call, "PROGRAM", program)
    with pytest.raises(ParallelError, match=f"{REFUSAL}: "):
        call_in_subprocess(REFUSAL, ARGUMENTS, str | None)
    assert not trap.exists()
    pickle.loads(pickled)  # noqa: S301 - shows that the trap works
    assert trap.exists()


def test_a_result_counts_only_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while writing has no result."""
    program = "import sys; open(sys.argv[1] + '/partial', 'wb').write(b'x'); print('out of memory')"
    monkeypatch.setattr(subprocess_call, "PROGRAM", program)
    with pytest.raises(ParallelError, match="refusal ended without a result: out of memory"):
        call_in_subprocess(REFUSAL, ARGUMENTS, str | None)


OPTION_CASES = [
    {},
    {"parallel_config": "auto", "microbatch_size": "auto", "memory_gib": 0.5},
    {"parallel_config": {"data": "rest", "tensor_parallel": 2}, "shares": [3, 1]},
    {"parallel_config": Layout(data=4, expert=2, replicate=2), "betas": (0.8, 0.9)},
    {"devices": {"cpu": "0-1,3", "npu": "2"}, "optimizer": {"name": "SGD", "momentum": 0.9}},
    {"mixed_precision": "float16", "loss_scale": {"initial": 8.0}, "recompute": "8GiB"},
    {"schedule": one_f_one_b(2, 4), "schedule_memory_gib": (1.0, 2.0)},
    {"schedule": Path("table.txt"), "cluster": "cluster.toml", "seed": 2**63 - 1},
    {"model_config": {"rope_scaling": {"kind": "linear", "factor": 2.0}, "tie": None}},
]


@pytest.mark.parametrize("settings", OPTION_CASES)
def test_options_survive_encoding(settings: dict[str, Any]) -> None:
    """Options survive a round trip for all types of settings."""
    options = Options("llama", output_dir="runs/it", **settings)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(RunRecord.of(options)), type=RunRecord)
    names = [name for name in dir(options) if not name.startswith("_")]
    assert {name: getattr(decoded.options, name) for name in names} == {
        name: getattr(options, name) for name in names
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 2**70}, "serialize ints"),
        ({"hidden_size": object()}, "Encoding objects of type object"),
    ],
)
def test_options_that_cannot_be_encoded_are_refused(config: dict[str, Any], message: str) -> None:
    """Before a process starts."""
    with pytest.raises(ParallelError, match=message) as raised:
        ask_memory(Options("llama", model_config=config), Layout(), None, None)
    assert "\n" not in str(raised.value)


def test_a_cluster_is_validated_like_its_file() -> None:
    """By the process that receives it."""
    rates = {"float32": 1.0}
    cluster = Cluster(memory_gib=1.0, memory_bandwidth_gb_per_s=1.0, peak_tflops=rates)
    arguments = PlanArguments(
        run=RunRecord.of(Options("llama")),
        cluster=cluster,
        objective="fastest",
        best=1,
        every=False,
        shards=None,
        history=History(),
    )
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
    assert msgspec.convert(content, PlanArguments).cluster == cluster
    content["cluster"]["memory_gib"] = -1.0
    with pytest.raises(msgspec.ValidationError, match="memory_gib must be"):
        msgspec.convert(content, PlanArguments)
