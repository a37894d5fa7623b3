"""A recorder's ring as a trace, so that all that reads traces shows it too."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.log.ring import Kind, RingRecording
from ms_profile.trace.columns import Thread, Trace
from ms_profile.vendors.category import Category

CATEGORY: Final = {
    Kind.STEP: Category.ANNOTATION,
    Kind.FORWARD: Category.OPERATOR,
    Kind.MODULE: Category.OPERATOR,
    Kind.OPTIMIZER: Category.OPERATOR,
    Kind.COLLECTIVE: Category.COLLECTIVE,
    Kind.DATA: Category.ANNOTATION,
    Kind.GARBAGE: Category.ANNOTATION,
    Kind.BETWEEN: Category.ANNOTATION,
    Kind.BACKWARD: Category.OPERATOR,
    Kind.OTHER: Category.ANNOTATION,
}
COLLECTED: Final = 0
"""The thread number of what was recorded after it had happened."""


def trace_of_ring(recording: RingRecording, *, file_bytes: int = 0, name: str = "ring") -> Trace:
    """Put a ring's spans on the wall clock, steps by number; forward and backward count as compute.

    Spans that had not ended when the recording did end with it; a warning names them. Step 0, which
    begins with the recorder and so holds the script's start, is no step where there are others.
    """
    spans = recording.spans
    start = spans["start_ns"].astype(np.int64)
    last = max(int(start.max(initial=0)), int(spans["end_ns"].astype(np.int64).max(initial=0)))
    still_open = spans["end_ns"] == 0
    end = np.where(still_open, last, spans["end_ns"].astype(np.int64))
    kinds = np.array([_category(code) for code in range(256)], np.uint8)
    names, code = _names(recording)
    thread = spans["thread"].astype(np.int32)
    offset = recording.clock.offset_ns
    order = np.lexsort((start - end, start, thread))
    return Trace(
        start_ns=(start + offset)[order],
        duration_ns=(end - start)[order],
        name=code[order],
        category=kinds[spans["kind"]][order],
        thread=thread[order],
        names=names,
        threads=tuple(_thread(recording.pid, number) for number in range(256)),
        rank=recording.rank,
        warnings=_warnings(recording, still_open, name),
        file_bytes=file_bytes,
    )


def _category(code: int) -> int:
    return int(CATEGORY[Kind(code)]) if code in CATEGORY else int(Category.OTHER)


def _names(recording: RingRecording) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the table of names and each span's number in it; steps get the profilers' names."""
    spans = recording.spans
    is_step = spans["kind"] == Kind.STEP
    if (spans["step"][is_step] > 0).any():
        is_step &= spans["step"] > 0
    is_data = spans["kind"] == Kind.DATA
    steps, place = np.unique(spans["step"], return_inverse=True)
    names = [recording.name_of(number) for number in range(len(recording.names))]
    unknown = len(names)
    names.append("?")
    code = np.where(spans["name"] < unknown, spans["name"], unknown).astype(np.int32)
    code = np.where(is_step, unknown + 1 + place, code)
    # As `activity` knows waits for batches by their names, whatever the script calls them.
    names += [f"ProfilerStep#{step}" for step in steps.tolist()]
    waits, place = np.unique(code[is_data], return_inverse=True)
    code[is_data] = len(names) + place
    names += [f"data_wait: {names[wait]}" for wait in waits.tolist()]
    return tuple(names), code.astype(np.int32)


def _thread(pid: int, number: int) -> Thread:
    name = f"thread {number}" if number != COLLECTED else "collected afterwards"
    return Thread(process=pid, thread=number, process_name="recorder", name=name)


def _warnings(
    recording: RingRecording, still_open: NDArray[np.bool_], name: str
) -> tuple[str, ...]:
    warnings = [
        f"{name} is a recorder's ring: steps and modules, without operators or kernels; what waits "
        "inside of a forward, a backward or an optimizer counts as compute"
    ]
    if recording.dropped:
        warnings.append(f"{name}: {recording.dropped} older spans were written over")
    inside = [recording.name_of(int(span["name"])) for span in recording.spans[still_open]]
    if inside:
        step = int(recording.spans[still_open]["step"].max())
        warnings.append(
            f"{name}: when it was written last, the process was in step {step}, inside of "
            f"{' > '.join(inside[-12:])}"
        )
    return tuple(warnings)
