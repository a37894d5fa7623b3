"""What is asked of a process of its own, and answered, is records: values, and nothing else."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError, ParallelError
from ms_parallel.planner import apart
from ms_parallel.planner.apart import LIMIT_BYTES, call_in_subprocess
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.record.history import History
from ms_parallel.planner.refusal import REFUSAL, LayoutArguments
from ms_parallel.schedules import one_f_one_b
from ms_parallel.training.options import Options
from ms_parallel.training.planning.subprocesses import PlanArguments, RunRecord, ask_memory

QUESTION = LayoutArguments(model="llama", layout=Layout(tensor=3), options={})


class _Trap:
    """A value whose unpickling would do something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_question_is_answered_whatever_is_printed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may print when it is imported, to standard output too."""
    (tmp_path / "sitecustomize.py").write_text("print('a line')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "tensor=3 does not divide" in call_in_subprocess(REFUSAL, QUESTION, str | None)


@pytest.mark.parametrize(
    ("settings", "layout", "error", "says"),
    [
        ({"batch_size": 9}, Layout(data=2), ConfigError, "batch_size=9 does not divide over"),
        ({"sequence_length": 510}, Layout(tensor=3), LayoutError, "tensor=3 does not divide"),
    ],
)
def test_an_error_comes_back_as_what_it_is(
    settings: dict[str, Any], layout: Layout, error: type[ParallelError], says: str
) -> None:
    """Its class, so its exit code, and its text."""
    with pytest.raises(error, match=says) as raised:
        ask_memory(Options("llama", device="cpu", **settings), layout, None, None)
    assert type(raised.value) is error


def test_a_process_that_ends_says_why() -> None:
    """The last that it has said: there is no such function, or it is none of this package."""
    with pytest.raises(ParallelError, match=r"nowhere:no ended without a result: ModuleNotFound"):
        call_in_subprocess("ms_parallel.nowhere:no", QUESTION, str)
    for foreign in ("builtins:print", "os:system", "ms_parallel_other.module:function"):
        with pytest.raises(ParallelError, match="is not a function of ms_parallel"):
            call_in_subprocess(foreign, QUESTION, str)


def test_an_answer_of_another_kind_is_refused() -> None:
    """It is checked against the type that is waited for."""
    with pytest.raises(ParallelError, match=r"refusal:refusal: Expected `int`, got `str`"):
        call_in_subprocess(REFUSAL, QUESTION, int)


def test_no_pickle_is_read_on_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands where a record should is refused, and nothing that it says is done."""
    import pickle

    trap = tmp_path / "trapped"
    loaded = pickle.dumps(_Trap(trap))
    framed = len(loaded).to_bytes(apart.SIZE_BYTES, "big") + loaded
    readable, writable = os.pipe()
    asked = subprocess.run(
        [sys.executable, "-c", apart.PROGRAM, str(writable)],
        input=framed,
        capture_output=True,
        pass_fds=(writable,),
        check=False,
    )
    os.close(writable)
    with open(readable, "rb") as results:
        assert results.read() == b""
    assert asked.returncode
    assert b"ParallelError: a call: " in asked.stderr
    answering = f"import os, sys; os.write(int(sys.argv[1]), {framed!r})"
    monkeypatch.setattr(apart, "PROGRAM", answering)
    with pytest.raises(ParallelError, match=f"{REFUSAL}: "):
        call_in_subprocess(REFUSAL, QUESTION, str | None)
    assert not trap.exists()
    pickle.loads(loaded)  # noqa: S301 - to see that it would have
    assert trap.exists()


def test_sizes_are_checked_before_memory_is_taken() -> None:
    """What announces more than any record has is not read; what ends too early is none."""

    class Counted(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.asked = max(self.asked, size or 0)
            return super().read(size)

    endless = Counted((1 << 62).to_bytes(apart.SIZE_BYTES, "big") + b"x" * 64)
    with pytest.raises(ParallelError, match="bytes; the maximum is"):
        apart._read(endless)
    assert endless.asked == apart.SIZE_BYTES
    assert apart._read(io.BytesIO(LIMIT_BYTES.to_bytes(apart.SIZE_BYTES, "big") + b"x")) is None
    assert apart._read(io.BytesIO(b"\0\0")) is None
    long = LayoutArguments(model="m" * LIMIT_BYTES, layout=Layout(), options={})
    with pytest.raises(ParallelError, match="bytes; the maximum is"):
        call_in_subprocess(REFUSAL, long, str | None)


EVERY_KIND = [
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


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_options_are_the_same_behind_a_record(settings: dict[str, Any]) -> None:
    """Options give the same options again, whatever kind a setting is of."""
    options = Options("llama", output_dir="runs/it", **settings)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(RunRecord.of(options)), type=RunRecord)
    names = [name for name in dir(options) if not name.startswith("_")]
    assert {name: getattr(told.options, name) for name in names} == {
        name: getattr(options, name) for name in names
    }


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 2**70}, "serialize ints"),
        ({"hidden_size": object()}, "Encoding objects of type object"),
    ],
)
def test_what_no_record_holds_is_refused_in_one_line(config: dict[str, Any], says: str) -> None:
    """Before a process begins."""
    with pytest.raises(ParallelError, match=says) as raised:
        ask_memory(Options("llama", model_config=config), Layout(), None, None)
    assert "\n" not in str(raised.value)


def test_a_cluster_is_checked_as_its_file_is() -> None:
    """By the process that is asked about it."""
    rates = {"float32": 1.0}
    here = Cluster(memory_gib=1.0, memory_bandwidth_gb_per_s=1.0, peak_tflops=rates)
    asked = PlanArguments(
        run=RunRecord.of(Options("llama")),
        cluster=here,
        objective="fastest",
        best=1,
        every=False,
        shards=None,
        history=History(),
    )
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(asked))
    assert msgspec.convert(content, PlanArguments).cluster == here
    content["cluster"]["memory_gib"] = -1.0
    with pytest.raises(msgspec.ValidationError, match="memory_gib must be"):
        msgspec.convert(content, PlanArguments)
