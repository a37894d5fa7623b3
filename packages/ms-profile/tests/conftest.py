"""Traces for the tests: real ones of two gloo ranks, and synthetic ones in Kineto's format."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from browser import Tab, open_tab

from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.records import Arguments, TraceEvent

# On a busy machine a test case may take longer than hypothesis allows.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

FOLDER = Path(__file__).parent / "traces"
Span = tuple[str, str, int | str, float, float]
"""Label, name, thread, start and duration in µs."""


@pytest.fixture
def traces_folder() -> Path:
    """The folder of real traces: `ddp` and `fsdp`, two ranks each."""
    return FOLDER


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The tab of a browser that is started once."""
    with open_tab(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """Return a function that builds a trace from spans; device spans have correlation ids."""

    def make(spans: Sequence[Span], *, rank: int = 0, host: str = "", messages: int = 0) -> Trace:
        builder = TraceBuilder()
        records = []
        for number, (label, name, thread, start, length) in enumerate(spans):
            device = label in ("kernel", "gpu_memcpy")
            arguments = Arguments(correlation=number if device else -1)
            if messages and label == "kernel" and name.startswith("nccl"):
                arguments = Arguments(
                    correlation=number, collective="allreduce", sent_elements=messages,
                    received_elements=messages, dtype="Float", group="0", group_size=2,
                )  # fmt: skip
            records.append(
                TraceEvent(
                    ph="X", name=name, cat=label, pid=0, tid=thread, ts=start, dur=length,
                    args=arguments,
                )
            )  # fmt: skip
        builder.add(records)
        distributed_info = {"rank": rank, "world_size": 2}
        return builder.finish({"distributedInfo": distributed_info, "host_name": host}, (), 0)

    return make


@pytest.fixture
def kineto_text() -> Callable[[Sequence[dict[str, Any]]], str]:
    """Return a function that formats events like Kineto: on separate lines, indented by two."""

    def write(events: Sequence[dict[str, Any]]) -> str:
        parts = []
        for event in events:
            lines = json.dumps(event, indent=2).splitlines()
            parts.append("\n".join("  " + line for line in lines))
        body = ",\n".join(parts)
        head = '{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": 1000000000,\n'
        return f'{head}  "traceEvents": [\n{body}\n  ],"traceName": "made" }}'

    return write
