"""Kineto over windows of steps: torch's own profiler, started and stopped from outside the script.

Only the steps of a window are slowed, and a window's records are saved before the next step begins.
Needs torch; imported once the script has imported it.
"""

import logging
import os
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
ROOM_BYTES = 1 << 17


class Tracer:
    """Trace the steps that a schedule names.

    Args:
        folder: the run's output folder.
        rank: of this process.
        schedule: which steps.
        collect: what beside times.
        on_saving: called before a file is written, which may take the room that is left.
        on_saved: called with each file.
        on_problem: called with a sentence on what could not be recorded.
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
        self._number = len(list((folder / "traces").glob(f"rank-{rank:05d}.*")))

    def busy(self, step: int) -> bool:
        """Return whether the tracer needs Kineto for itself from this step on."""
        return self._profile is not None or action_at(self._schedule, step) is not StepAction.NONE

    @property
    def tracing(self) -> bool:
        """Whether the tracer is on, and so slows the current step."""
        return self._profile is not None

    def end_update(self, step: int) -> None:
        """Save the window if `step`, whose update is done, is its last; see `recording.scopes`."""
        if action_at(self._schedule, step) is StepAction.RECORD_AND_SAVE:
            self.finish()

    def begin_step(self, step: int) -> None:
        """Do what is due at the boundary before `step`."""
        phase = action_at(self._schedule, step)
        if self._profile is None:
            if phase is not StepAction.NONE:
                self._start(step)
            return
        before = action_at(self._schedule, step - 1)
        self._steps += before is not StepAction.WARMUP
        if before is StepAction.RECORD_AND_SAVE:
            self._note_groups()
        elif before is StepAction.WARMUP:
            self._since_ns = time.time_ns()
        self._profile.step()
        if phase is StepAction.NONE or (phase is StepAction.WARMUP and self._steps):
            self._end()
            if phase is StepAction.WARMUP:
                self._start(step)

    def finish(self) -> None:
        """Save the window that ends in the current step, if one is open."""
        if self._profile is not None:
            self._steps += 1
            self._note_groups()
            self._end()

    def abandon(self) -> None:
        """End the window silently in a forked child; the parent goes on with it."""
        if self._profile is not None:
            self._profile = None
            if self._accelerated:  # its profiler cannot be reached from a child, nor used in it
                torch._C._autograd._enable_record_function(False)
            else:  # free for a profiler of the child's own
                torch._C._autograd._disable_profiler()

    def _start(self, step: int) -> None:
        if getattr(autograd_profiler, "_is_profiler_enabled", False):
            self._on_problem(f"step {step}: the script's own profiler was on; nothing was traced")
            return
        traced: Any = profile(
            schedule=lambda number: ProfilerAction[action_at(self._schedule, number).name],
            on_trace_ready=self._save,
            record_shapes=Collect.SHAPES in self._collect,
            profile_memory=Collect.MEMORY in self._collect,
        )
        # Its step numbers, and so the marks `ProfilerStep#n` in the trace, are to be the run's.
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
        ending, self._profile = self._profile, None
        ending.stop()

    def _note_groups(self) -> None:
        """Put what names the collectives' groups into the trace that is about to be saved."""
        noted = recorded_groups(self._since_ns) if Collect.GROUPS in self._collect else None
        if noted is not None:
            self._profile.add_metadata_json(KEY, noted)

    def _save(self, traced: "profile") -> None:
        """Write the window's trace aside and give it its name once it is whole."""
        path = trace_path(self._folder, self._rank, self._number)
        aside = path.with_name(f"{path.name}.partial")
        self._on_saving()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(aside))
            # Kineto writes to a name of its own first, and leaves it there when the disk is full.
            cut = aside.with_name(f"{aside.name}.tmp")
            if cut.exists() and not aside.exists():
                cut.replace(aside)
            complete = _ends_whole(aside)
            if not complete:
                _give_back(aside)
            size = aside.stat().st_size
            aside.replace(path)
        except (OSError, RuntimeError) as error:
            self._on_problem(f"the trace from step {self._first} could not be written: {error}")
            return
        if not complete:
            self._on_problem(
                f"{path.name} is cut short after {size} bytes; is the disk full? "
                "What it holds can still be read"
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


def _give_back(path: Path) -> None:
    """Cut the end off a trace that filled the disk: the log and the manifest find room again."""
    size = path.stat().st_size
    if size > 2 * ROOM_BYTES:
        os.truncate(path, size - ROOM_BYTES)


def _ends_whole(path: Path) -> bool:
    """Return whether a JSON object's last byte is there."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 16, 0))
        return file.read().rstrip().endswith(b"}")


def accelerator() -> str:
    """Return the kind of accelerator that torch sees, `cpu` where none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type
