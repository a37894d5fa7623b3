"""Convert a recorder's ring to a `Trace`, so that every analysis and report accepts it."""

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
"""Thread id of spans that were collected afterwards, such as collectives."""


def trace_of_ring(recording: RingRecording, *, file_bytes: int = 0, name: str = "ring") -> Trace:
    """Convert a ring's spans to wall-clock time; forward and backward count as compute.

    Spans still open at the last write end there, and a warning names them. Step 0 includes the
    script's startup, so it is dropped if the ring has later steps.
    """
    spans = recording.spans
    start = spans["start_ns"].astype(np.int64)
    # A span still open has end 0. It is drawn up to the last time in the ring.
    last_ns = max(int(start.max(initial=0)), int(spans["end_ns"].astype(np.int64).max(initial=0)))
    still_open = spans["end_ns"] == 0
    end = np.where(still_open, last_ns, spans["end_ns"].astype(np.int64))
    # Lookup table over all values of the kind byte; a newer version may have more kinds.
    kinds = np.array([_category(code) for code in range(256)], np.uint8)
    names, code = _names(recording)
    thread = spans["thread"].astype(np.int32)
    offset = recording.clock.offset_ns
    # By thread, start, and longest first: `start - end` is the negative duration.
    order = np.lexsort((start - end, start, thread))
    return Trace(
        start_ns=(start + offset)[order],
        duration_ns=(end - start)[order],
        name=code[order],
        category=kinds[spans["kind"]][order],
        thread=thread[order],
        names=names,
        threads=tuple(_thread(recording.pid, number) for number in range(256)),  # one byte
        rank=recording.rank,
        warnings=_warnings(recording, still_open, name),
        file_bytes=file_bytes,
    )


def _category(code: int) -> int:
    return int(CATEGORY[Kind(code)]) if code in CATEGORY else int(Category.OTHER)


def _names(recording: RingRecording) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the table of names and the name id of each span; steps are named as by Kineto."""
    spans = recording.spans
    is_step = spans["kind"] == Kind.STEP
    if (spans["step"][is_step] > 0).any():
        # Step 0 keeps the plain name "step", which `find_steps` ignores.
        is_step &= spans["step"] > 0
    is_data = spans["kind"] == Kind.DATA
    steps, position = np.unique(spans["step"], return_inverse=True)
    names = [recording.name_of(number) for number in range(len(recording.names))]
    unknown = len(names)
    names.append("?")
    code = np.where(spans["name"] < unknown, spans["name"], unknown).astype(np.int32)
    # Ids after the ring's own names: "?", then one name per step, then one per kind of wait.
    code = np.where(is_step, unknown + 1 + position, code)
    # `activity` recognizes waits for batches by the prefix `data_wait`.
    names += [f"ProfilerStep#{step}" for step in steps.tolist()]
    waits, position = np.unique(code[is_data], return_inverse=True)
    code[is_data] = len(names) + position
    names += [f"data_wait: {names[wait]}" for wait in waits.tolist()]
    return tuple(names), code.astype(np.int32)


def _thread(pid: int, thread_id: int) -> Thread:
    name = f"thread {thread_id}" if thread_id != COLLECTED else "collected afterwards"
    return Thread(process=pid, thread=thread_id, process_name="recorder", name=name)


def _warnings(
    recording: RingRecording, still_open: NDArray[np.bool_], name: str
) -> tuple[str, ...]:
    warnings = [
        f"{name} is a recorder's ring: it has steps and modules but no operators or kernels; waits "
        "inside a forward, a backward or an optimizer step count as compute"
    ]
    if recording.dropped:
        warnings.append(f"{name}: {recording.dropped} older spans were overwritten")
    open_spans = [recording.name_of(int(span["name"])) for span in recording.spans[still_open]]
    if open_spans:
        step = int(recording.spans[still_open]["step"].max())
        warnings.append(
            f"{name}: at the last write, the process was in step {step}, inside "
            f"{' > '.join(open_spans[-12:])}"
        )
    return tuple(warnings)
