"""Trace windows of steps with torch's profiler (Kineto), started and stopped outside the script.

Only the steps of a window are slowed down, and a window is saved before the next step begins.
Needs torch; imported once the script has imported it.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, profile

from ms_profile.log.manifest import TraceFile, TraceSchedule, trace_path
from ms_profile.metrics import Collect
from ms_profile.recording.flight_recorder import KEY, recorded_groups
from ms_profile.recording.trace_schedule import StepAction, action_at

logger = logging.getLogger(__name__)
RESERVE_BYTES = 1 << 17  # freed for the event log and the manifest if a trace fills the disk
END = re.compile(rb'\n\s*\]\s*(,\s*"\w+"\s*:\s*("([^"\\]|\\.)*"|[\w.+-]+)\s*)*\}\s*$')
"""End of a trace: the list of events closes on its own line, which lists and strings inside events
never do; members such as `traceName` follow, then a brace."""
END_BYTES = 1 << 15
"""Bytes at the end of a trace that hold `END`: the name is a path of at most 4 KiB."""


class WindowTracer:
    """Trace the steps selected by a schedule.

    Args:
        folder: the run's output folder.
        rank: rank of this process.
        schedule: steps to trace.
        collect: data to record in addition to durations.
        on_saving: called before a trace is written, which may fill the disk.
        on_saved: called with each written trace.
        on_problem: called with a description of anything that could not be recorded.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        schedule: TraceSchedule,
        collect: Collect,
        *,
        on_saving: Callable[[], None] = lambda: None,
        on_saved: Callable[[TraceFile], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._folder, self._rank, self._schedule = folder, rank, schedule
        self._collect, self._on_saved, self._on_problem = collect, on_saved, on_problem
        self._on_saving = on_saving
        self._profile: Any = None
        self._accelerated = torch.accelerator.is_available()
        self._first = 0
        self._since_ns = 0
        self._steps = 0
        # A restarted rank continues the numbers of its predecessor's windows.
        self._number = len(list((folder / "traces").glob(f"rank-{rank:05d}.*")))

    def busy(self, step: int) -> bool:
        """Return whether the tracer needs exclusive use of Kineto in this step."""
        return self._profile is not None or action_at(self._schedule, step) is not StepAction.NONE

    @property
    def tracing(self) -> bool:
        """Whether the tracer is running, which slows the current step."""
        return self._profile is not None

    def end_update(self, step: int) -> None:
        """Save the window if the updated `step` is its last; see `recording.scopes`."""
        if action_at(self._schedule, step) is StepAction.RECORD_AND_SAVE:
            self.finish()

    def begin_step(self, step: int) -> None:
        """Start, advance or end the window at the boundary before `step`."""
        action = action_at(self._schedule, step)
        if self._profile is None:
            if action is not StepAction.NONE:
                self._start(step)
            return
        previous_action = action_at(self._schedule, step - 1)
        self._steps += previous_action is not StepAction.WARMUP
        if previous_action is StepAction.RECORD_AND_SAVE:
            self._note_groups()
        elif previous_action is StepAction.WARMUP:
            self._since_ns = time.time_ns()
        # Calls `_save` through `on_trace_ready` if the step that ended was the window's last.
        self._profile.step()
        # The window is saved. The warmup of the next one may begin in this very step.
        if action is StepAction.NONE or (action is StepAction.WARMUP and self._steps):
            self._end()
            if action is StepAction.WARMUP:
                self._start(step)

    def finish(self) -> None:
        """Save the open window, which ends in the current step, if any."""
        if self._profile is not None:
            self._steps += 1
            self._note_groups()
            self._end()

    def abandon(self) -> None:
        """Drop the window silently in a forked child; the parent keeps tracing."""
        if self._profile is not None:
            self._profile = None
            if self._accelerated:  # the accelerator's profiler is unreachable in a child
                torch._C._autograd._enable_record_function(False)
            else:  # allows the child to start its own profiler
                torch._C._autograd._disable_profiler()

    def _start(self, step: int) -> None:
        if getattr(autograd_profiler, "_is_profiler_enabled", False):
            self._on_problem(
                f"step {step}: the script's own profiler was active, so the window was not traced"
            )
            return
        traced: Any = profile(
            schedule=lambda number: ProfilerAction[action_at(self._schedule, number).name],
            on_trace_ready=self._save,
            record_shapes=Collect.SHAPES in self._collect,
            profile_memory=Collect.MEMORY in self._collect,
        )
        # Makes the profiler's step numbers, and `ProfilerStep#n` in the trace, equal the run's.
        traced.step_num = step
        traced.current_action = traced.schedule(step)
        warming = traced.current_action == ProfilerAction.WARMUP
        self._first = step + (self._schedule.warmup if warming else 0)
        self._steps = 0
        self._since_ns = time.time_ns()
        self._profile = traced
        traced.start()
        traced.add_metadata("rank", str(self._rank))

    def _end(self) -> None:
        profiler, self._profile = self._profile, None
        profiler.stop()

    def _note_groups(self) -> None:
        """Store the process groups of the collectives in the trace that is about to be saved."""
        groups = recorded_groups(self._since_ns) if Collect.GROUPS in self._collect else None
        if groups is not None:
            self._profile.add_metadata_json(KEY, groups)

    def _save(self, traced: "profile") -> None:
        """Write the window's trace to a temporary name and rename it when complete."""
        path = trace_path(self._folder, self._rank, self._number)
        partial = path.with_name(f"{path.name}.partial")
        self._on_saving()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(partial))
            # Kineto writes to its own .tmp name first, and leaves it there when the disk is full.
            unfinished = partial.with_name(f"{partial.name}.tmp")
            if unfinished.exists() and not partial.exists():
                unfinished.replace(partial)
            complete = _is_complete(partial)
            if not complete:
                _free_reserve(partial)
            size = partial.stat().st_size
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            self._on_problem(f"the trace from step {self._first} could not be written: {error}")
            return
        if not complete:
            self._on_problem(
                f"{path.name} is truncated after {size} bytes; is the disk full? "
                "The part that was written can still be read"
            )
        self._number += 1
        self._on_saved(
            TraceFile(
                path=path.relative_to(self._folder).as_posix(),
                first_step=self._first,
                steps=self._steps,
                size_bytes=size,
                complete=complete,
            )
        )


def _free_reserve(path: Path) -> None:
    """Truncate a trace that filled the disk, to free space for the event log and the manifest."""
    size = path.stat().st_size
    if size > 2 * RESERVE_BYTES:
        os.truncate(path, size - RESERVE_BYTES)


def _is_complete(path: Path) -> bool:
    """Return whether the file ends with the end of its list of events and of the whole object.

    A closing brace alone proves nothing: a truncated file may end with the brace of an event.
    """
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - END_BYTES, 0))
        return END.search(file.read()) is not None


def accelerator() -> str:
    """Return the accelerator type that torch sees, or `cpu`."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type
