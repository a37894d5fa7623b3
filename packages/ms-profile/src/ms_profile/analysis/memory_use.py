"""Peak memory by category, module and line, live allocations at the peak, and fragmentation.

The category of an allocation follows from its call stack and its lifetime. Memory freed in the
phase that allocated it (forward, backward, optimizer step) is a buffer; the phase's other
allocations are activations, gradients or moments. The backward runs on autograd's threads, which
have no Python frames, so allocations without a stack are attributed to the backward if the
recording has a forward.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from attrs import frozen
from msgspec import Meta
from numpy.typing import NDArray

from ms_profile.analysis.allocations import (
    Allocations,
    Frame,
    Stack,
    allocations_of_trace,
    read_snapshot,
)
from ms_profile.errors import TraceError
from ms_profile.files.untrusted import check_path, open_file, read_json
from ms_profile.trace.reader import gc_paused, read_trace

CATEGORIES: Final = {
    "weights": "parameters and buffers of the model",
    "gradients": "allocated in the backward, live after it",
    "moments": "state of the optimizer",
    "activations": "allocated in the forward, live after it",
    "buffers": "communication, and temporaries freed in the phase that allocated them",
    "other": "batches and anything else the script allocates",
    "unknown": "allocated before recording began, or without a call stack",
}
PREDICTED: Final = ("weights", "gradients", "moments", "activations", "buffers")
ANYWHERE: Final = (
    ("gradients", re.compile(r"AccumulateGrad")),
    ("moments", re.compile(r"(^|/)optim(izer)?s?/|Optimizer\.step#")),
    ("backward", re.compile(r"_engine_run_backward|:(\w+\.)?(backward|unpack_hook|recompute_fn)$"
                            r"|autograd::(engine|Engine)")),
)  # fmt: skip
"""Role of a stack with a matching frame ("file:function") at any depth; the first match wins."""
INNERMOST: Final = (
    ("buffers", re.compile(r"torch/distributed/|^:(gloo|nccl|hccl):|c10d::|:record_param_comms")),
    ("activations", re.compile(r":(.*\.)?(forward|_call_impl)$|:nn\.Module: ")),
    ("weights", re.compile(r"nn/modules/module\.py:(\w+\.)?(_apply|to|cuda|to_empty)$|nn/init\.py:"
                           r"|:(.*\.)?(__init__|from_pretrained|load_state_dict)$")),
)  # fmt: skip
"""Role of a stack by its innermost matching frame."""
PHASE: Final = {"gradients": "backward", "activations": "forward", "moments": "optimizer",
                "backward": "backward"}  # fmt: skip
LIBRARY: Final = re.compile(r"(^|/)torch/|^<|\.(cpp|cc|h|hpp|cu)$|^\?\?$|\.so(\.|$)")
"""Files of torch, generated code and C++: never the line of the user's code to report."""
FORWARD: Final = re.compile(r"(?:(.*)\.)?forward$")
MAX_POINTS: Final = 1200
MAX_ROWS: Final = 200
SMALL_SHARE: Final = 0.1


@frozen(kw_only=True)
class LiveStack:
    """Allocations of one call stack that are live at the peak."""

    category: str
    module: str
    line: str
    size_bytes: int
    count: int
    stack: tuple[str, ...]
    """Frames as `file:line function`, innermost first."""


@frozen(kw_only=True)
class MemoryTotals:
    """Sizes in bytes."""

    peak: int
    """Peak of allocated memory."""
    reserved_at_peak: int
    peak_reserved: int
    at_end: int


@frozen(kw_only=True)
class MemoryUse:
    """Memory of one device; all sizes in bytes."""

    device: int
    """Device index; -1 for the host."""
    events: int
    allocations: int
    totals: MemoryTotals
    peak_event: int
    peak_s: float
    """Time of the peak after the first event, in seconds."""
    categories: dict[str, int]
    """Size at the peak by category of `CATEGORIES`."""
    highest: dict[str, int]
    """Highest size of each category at any time; these do not sum to the peak."""
    predicted: dict[str, int] | None
    """Predicted size by category; None without a prediction."""
    modules: tuple[tuple[str, int], ...]
    """Modules and their sizes at the peak, largest first."""
    lines: tuple[tuple[str, int], ...]
    """Lines of code and their sizes at the peak, largest first."""
    live: tuple[LiveStack, ...]
    """Largest stacks at the peak."""
    live_stacks: int
    """Number of stacks at the peak, including those not listed in `live`."""
    fragmentation: dict[str, Any] | None
    """`Segments` when the snapshot was written; None for a trace."""
    out_of_memory: tuple[dict[str, Any], ...]
    """Failed allocations."""
    timeline: dict[str, Any]
    """`at_s`, `reserved` and `categories` at no more than 1,200 events, with every local peak."""
    notes: tuple[str, ...]
    """What to do next, and limits of this recording; one sentence each."""


class _Rank(msgspec.Struct):
    weights: Annotated[int, Meta(ge=0)]
    gradients: Annotated[int, Meta(ge=0)]
    moments: Annotated[int, Meta(ge=0)]
    activations: Annotated[int, Meta(ge=0)]
    buffers: Annotated[int, Meta(ge=0)]


class _Layout(msgspec.Struct):
    memory: Annotated[list[_Rank], Meta(min_length=1)]


class _Plan(msgspec.Struct):
    best: Annotated[list[_Layout], Meta(min_length=1)]


def read_prediction(path: Path, *, pipeline_rank: int | None = None) -> dict[str, int]:
    """Read predicted memory by category, in bytes.

    Args:
        path: output of `ms-parallel plan --json` (its first layout is used), or a JSON list with
            the ranks of `ms_parallel.predict_memory`.
        pipeline_rank: rank to compare with. None: the rank with the most memory.

    Raises:
        TraceError: the file is neither of these, or has no such rank.
    """
    content: _Plan | list[_Rank] = read_json(path, _Plan | list[_Rank], error=TraceError)  # type: ignore[arg-type]
    ranks = content.best[0].memory if isinstance(content, _Plan) else content
    sizes = [{name: getattr(rank, name) for name in PREDICTED} for rank in ranks]
    if not sizes or (pipeline_rank is not None and not 0 <= pipeline_rank < len(sizes)):
        raise TraceError(
            f"pipeline rank must be 0 to {len(sizes) - 1} for {path}, got {pipeline_rank}; leave "
            "it out to compare with the rank that uses the most memory"
        )
    if pipeline_rank is not None:
        return sizes[pipeline_rank]
    return max(sizes, key=lambda rank: sum(rank.values()))


def analyse_memory(
    path: str | Path, *, predicted: Mapping[str, int] | None = None
) -> tuple[MemoryUse, ...]:
    """Analyze a memory snapshot or the [memory] events of a trace, one result per device.

    Args:
        path: file of `torch.cuda.memory._dump_snapshot`, or a trace with `profile_memory=True`.
        predicted: predicted bytes by category, from `read_prediction`.

    Raises:
        TraceError: the file is neither a snapshot nor a trace, is damaged, or records no memory.
    """
    check_path("a snapshot", path, error=TraceError)
    source = Path(path)
    if not source.is_file():
        problem = "is a folder" if source.is_dir() else "does not exist"
        raise TraceError(
            f"{source} {problem}; pass a memory snapshot, or a trace such as "
            "traces/rank-00000.000.json in the folder of a run"
        )
    with open_file(source, error=TraceError) as file:
        is_pickle = file.read(1) == b"\x80"
    if is_pickle:
        with gc_paused():
            devices = read_snapshot(source)
    elif source.suffix.lower() in (".pickle", ".pkl"):
        raise TraceError(f"{source} is not a pickle of protocol 2 to 5; write it again")
    else:
        devices = allocations_of_trace(read_trace(source))
    return tuple(_use(item, predicted) for item in devices)


def _use(allocations: Allocations, predicted: Mapping[str, int] | None) -> MemoryUse:
    category = _categorize(allocations)
    events = len(allocations.at_s)
    total = _curve(allocations, np.ones(len(allocations.size), bool))
    peak = int(total.argmax())
    # `total[0]` is the state before the first event.
    live = (allocations.begin < peak) & (allocations.end >= peak)
    size = np.where(live, allocations.size, 0)
    names = list(CATEGORIES)
    by_category = np.bincount(category, size, len(names)).astype(np.int64)
    module_of, line_of = zip(*map(_place, allocations.stacks), strict=True)
    stacks, sizes, counts = _live_stacks(allocations, category, live)
    reserved = allocations.reserved
    totals = MemoryTotals(
        peak=int(total[peak]),
        reserved_at_peak=int(reserved[max(peak - 1, 0)]) if events else _reserved(allocations),
        peak_reserved=int(reserved.max()) if events else _reserved(allocations),
        at_end=int(total[-1]),
    )
    listed = [
        LiveStack(
            category=names[code], module=module_of[stack], line=line_of[stack],
            size_bytes=stack_size, count=count,
            stack=tuple(map(_frame_text, allocations.stacks[stack])),
        )
        for (code, stack), stack_size, count in zip(stacks, sizes, counts, strict=True)
    ]  # fmt: skip
    return MemoryUse(
        device=allocations.device,
        events=events,
        allocations=len(allocations.size),
        totals=totals,
        peak_event=peak - 1,
        peak_s=float(allocations.at_s[max(peak - 1, 0)]) if events else 0.0,
        categories=dict(zip(names, by_category.tolist(), strict=True)),
        highest={
            name: int(_curve(allocations, category == code).max())
            for code, name in enumerate(names)
        },
        predicted=None if predicted is None else dict(predicted),
        modules=_largest(allocations, size, module_of),
        lines=_largest(allocations, size, line_of),
        live=tuple(listed[:MAX_ROWS]),
        live_stacks=len(listed),
        fragmentation=_fragmentation(allocations),
        out_of_memory=tuple(
            {
                "event": failure.event, "size_bytes": failure.size_bytes,
                "device_free_bytes": failure.device_free_bytes,
                "stack": [*map(_frame_text, failure.stack)],
            }
            for failure in allocations.out_of_memory
        ),
        timeline=_timeline(allocations, category, total),
        notes=tuple(_notes(allocations, totals, dict(zip(names, by_category.tolist(),
                                                         strict=True)))),
    )  # fmt: skip


def _reserved(allocations: Allocations) -> int:
    return 0 if allocations.segments is None else allocations.segments.reserved


def _curve(allocations: Allocations, rows: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the live bytes of some allocations before the first and after each event, (E + 1,)."""
    change = np.zeros(len(allocations.at_s) + 2, np.int64)
    np.add.at(change, allocations.begin[rows] + 1, allocations.size[rows])
    np.add.at(change, allocations.end[rows] + 1, -allocations.size[rows])
    curve: NDArray[np.int64] = change[:-1].cumsum()
    return curve


def _categorize(allocations: Allocations) -> NDArray[np.int64]:
    """Return the index into `CATEGORIES` of each allocation, (A,)."""
    role_of_stack = np.array([*map(_role, allocations.stacks)])
    # Stack 0 is the unknown stack. Autograd's threads have no Python frames.
    has_forward = bool((role_of_stack == "activations").any())
    role_of_stack[0] = "backward" if has_forward else "unknown"
    role = role_of_stack[allocations.stack]
    role[(allocations.begin < 0) & (allocations.stack == 0)] = "unknown"
    names = list(CATEGORIES)
    same_phase = _ends_in_its_phase(allocations, role)
    category = np.array([names.index("gradients" if r == "backward" else r) for r in
                         role.tolist()] or [], np.int64)  # fmt: skip
    transient = same_phase & np.isin(role, list(PHASE)) & (allocations.begin >= 0)
    category[transient] = names.index("buffers")
    return category


def _role(stack: Stack) -> str:
    """Return the role of a stack: a category, or "backward"."""
    texts = [f"{file}:{name}" for name, file, _ in stack]
    for role, pattern in ANYWHERE:
        if any(map(pattern.search, texts)):
            return role
    for text in texts:
        for role, pattern in INNERMOST:
            if pattern.search(text):
                return role
    # A trace without Python functions has only operators, mostly those in the forward.
    return "other" if any(file for _, file, _ in stack) else "activations"


def _ends_in_its_phase(allocations: Allocations, role: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which allocations are freed in the same phase (forward, backward, step), (A,)."""
    recorded = np.flatnonzero(allocations.begin >= 0)
    recorded = recorded[np.argsort(allocations.begin[recorded], kind="stable")]
    codes = {"forward": 0, "backward": 1, "optimizer": 2}
    phase = np.array([codes.get(PHASE.get(r, ""), -1) for r in role[recorded].tolist()], np.int64)
    begin, phase = allocations.begin[recorded][phase >= 0], phase[phase >= 0]
    # Phases are numbered in order: one more at each change. Before the first, the number is -1.
    run = np.concatenate([[0], np.cumsum(np.diff(phase) != 0)]) if len(phase) else phase
    run = np.concatenate([[-1], run])

    def run_at(event: NDArray[np.int64]) -> NDArray[np.int64]:
        at: NDArray[np.int64] = run[np.searchsorted(begin, event, side="right")]
        return at

    same: NDArray[np.bool_] = run_at(allocations.begin) == run_at(allocations.end)
    return same & (allocations.end < len(allocations.at_s))


def _place(stack: Stack) -> tuple[str, str]:
    """Return the module path, outermost first, and the innermost line outside torch."""
    modules = [name for frame in stack if (name := _module(frame))]
    # Consecutive frames of one module's forward count once.
    path = [name for index, name in enumerate(modules) if modules[index - 1 : index] != [name]]
    frame = next((f for f in stack if f[1] and not LIBRARY.search(f[1])), None)
    frame = frame or next((f for f in stack if f[1]), None)
    if frame is None and stack:
        frame = stack[0]
    line = "(no call stack)" if frame is None else _frame_text(frame)
    return " > ".join(reversed(path[:12])) or "(no module)", line


def _module(frame: Frame) -> str:
    """Return the name of the module if the frame is its forward; otherwise ""."""
    name, file, _ = frame
    if name.startswith("nn.Module: "):
        return name.removeprefix("nn.Module: ")
    match = FORWARD.fullmatch(name)
    if match is None or file.endswith("torch/nn/modules/module.py"):
        return ""
    return match[1] or Path(file).stem


def _frame_text(frame: Frame) -> str:
    name, file, line = frame
    if not file:
        return name
    return f"{'/'.join(file.split('/')[-2:])}:{line} {name}"


def _live_stacks(
    allocations: Allocations, category: NDArray[np.int64], live: NDArray[np.bool_]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return (category, stack), bytes and number of live allocations, largest first."""
    stacks = len(allocations.stacks)
    key = (category * stacks + allocations.stack)[live]
    keys, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    sizes = np.bincount(inverse, allocations.size[live], len(keys))
    order = np.argsort(-sizes, kind="stable")
    pairs = [divmod(int(value), stacks) for value in keys[order]]
    return pairs, sizes[order].astype(np.int64).tolist(), counts[order].tolist()


def _largest(
    allocations: Allocations, size: NDArray[np.int64], label_of: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    totals: defaultdict[str, int] = defaultdict(int)
    by_stack = np.bincount(allocations.stack, size, len(allocations.stacks))
    for label, amount in zip(label_of, by_stack.tolist(), strict=True):
        totals[label] += int(amount)
    rows = sorted(((name, amount) for name, amount in totals.items() if amount),
                  key=lambda row: -row[1])  # fmt: skip
    return tuple(rows[:MAX_ROWS])


def _fragmentation(allocations: Allocations) -> dict[str, Any] | None:
    segments = allocations.segments
    if segments is None:
        return None
    return {
        "segments": segments.count, "reserved": segments.reserved, "allocated": segments.allocated,
        "free": segments.free, "releasable": segments.releasable,
        "largest_free": segments.largest_free, "rounding": segments.rounding,
        "pools": dict(segments.pools),
    }  # fmt: skip


def _timeline(
    allocations: Allocations, category: NDArray[np.int64], total: NDArray[np.int64]
) -> dict[str, Any]:
    """Downsample the curves: the event with the most memory in each of 1,200 ranges of events."""
    edges = np.unique(np.linspace(0, len(total), min(MAX_POINTS, len(total)) + 1).astype(int))
    points = np.array([low + int(total[low:high].argmax()) for low, high in pairwise(edges)])
    curves = {
        name: _curve(allocations, category == code)[points].tolist()
        for code, name in enumerate(CATEGORIES)
        if (category == code).any()
    }
    times = np.concatenate([allocations.at_s[:1], allocations.at_s])
    reserved = np.concatenate([allocations.reserved[:1], allocations.reserved])
    if not len(allocations.at_s):
        times, reserved = np.zeros(1), np.array([_reserved(allocations)])
    return {"at_s": np.round(times[points], 6).tolist(), "reserved": reserved[points].tolist(),
            "categories": curves}  # fmt: skip


def _notes(
    allocations: Allocations, totals: MemoryTotals, categories: Mapping[str, int]
) -> list[str]:
    notes = []
    for failure in allocations.out_of_memory[-1:]:
        segments = allocations.segments
        free = "" if segments is None else (
            f", and the allocator holds {_gib(segments.free)} free in pieces of at most "
            f"{_gib(segments.largest_free)}"
        )  # fmt: skip
        notes.append(
            f"an allocation of {_gib(failure.size_bytes)} failed: the device has "
            f"{_gib(failure.device_free_bytes)} free{free}"
        )
    unused = totals.reserved_at_peak - totals.peak
    if totals.reserved_at_peak and unused > SMALL_SHARE * totals.reserved_at_peak:
        notes.append(
            f"{_gib(unused)} ({unused / totals.reserved_at_peak:.0%} of the reserved memory) is "
            "not in use at the peak; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if totals.peak and categories["activations"] > 0.4 * totals.peak:
        notes.append(
            f"activations are {categories['activations'] / totals.peak:.0%} of the peak; "
            "recompute them (activation checkpointing) or use smaller microbatches"
        )
    if totals.peak and categories["moments"] > 0.4 * totals.peak:
        notes.append(
            f"the optimizer's state is {categories['moments'] / totals.peak:.0%} of the peak; "
            "shard it (ZeRO, FSDP) or offload it"
        )
    if totals.peak and categories["unknown"] > SMALL_SHARE * totals.peak:
        notes.append(
            f"{categories['unknown'] / totals.peak:.0%} of the peak has no call stack; start "
            "recording before the model is created"
        )
    if allocations.damaged:
        notes.append(f"{allocations.damaged} damaged entries of the snapshot were skipped")
    return notes


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
