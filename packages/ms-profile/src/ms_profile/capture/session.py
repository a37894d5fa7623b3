"""One process of a run: what is recorded while the script runs, and saved however it ends."""

import gc
import os
import resource
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from ms_profile.capture.imports import when_imported
from ms_profile.capture.metrics import Recording
from ms_profile.capture.plan import Place, Plan, versions
from ms_profile.clock import read_clocks
from ms_profile.errors import CaptureError, RecordError
from ms_profile.events import EventLog
from ms_profile.format import (
    RankManifest,
    RunManifest,
    TraceFile,
    encode,
    rank_path,
    ring_path,
    write_whole,
)
from ms_profile.ring import Kind, Ring

if TYPE_CHECKING:
    from ms_profile.capture.scopes import ScopeRecorder
    from ms_profile.capture.tracer import Tracer
    from ms_profile.capture.watch import StepWatch

__all__ = ["Session"]

SLOW_FACTS_NS = 1_000_000_000
GARBAGE_NS = 50_000
"""Shorter collections are left out of the ring: the young ones come by the hundred."""


class Session:
    """Capture this process from now until `finish`.

    Raises:
        CaptureError: the output folder holds another run.
        RecordError: the output folder cannot be written.
    """

    def __init__(self, plan: Plan, place: Place) -> None:
        self._plan, self._place = plan, place
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if rank_path(plan.output_dir, place.rank).exists() and not restarted:
            raise CaptureError(
                f"{plan.output_dir} already holds a run; choose another --output-dir, "
                "or pass --overwrite"
            )
        self._warnings: list[str] = []
        self._traces: list[TraceFile] = []
        self._watch: StepWatch | None = None
        self._tracer: Tracer | None = None
        self._scopes: ScopeRecorder | None = None
        self._finished = False
        self.complete = True
        """Whether all that was to be recorded was."""
        try:
            self._open_files()
        except OSError as error:
            raise RecordError(f"{plan.output_dir} cannot be written: {error}") from error
        self._collecting_ns = 0
        gc.callbacks.append(self._on_garbage)
        self._since_ns = self._facts_ns = time.monotonic_ns()
        self._data_wait_ns = 0
        self.events(
            "run_start",
            {"script": str(plan.script), "host": self._manifest.host, "pid": os.getpid()},
        )
        when_imported("torch", self._on_torch)

    def finish(self, exit_code: int, error: str | None) -> None:
        """Save everything and stop; further calls do nothing."""
        if self._finished:
            return
        self._finished = True
        gc.callbacks.remove(self._on_garbage)
        self._save_torch()
        self.events("run_end", {"exit_code": exit_code, "error": error or ""})
        self.events.close()
        if self.events.lost:
            self._loss(f"{self.events.lost} events could not be written; is the disk full?")
        self._ring.close()
        self._write_manifest(
            status="failed" if exit_code else "done",
            exit_code=exit_code,
            error=error,
            end=read_clocks(),
        )

    @property
    def manifest(self) -> RankManifest:
        """What was recorded, as last written."""
        return self._manifest

    @property
    def steps(self) -> int:
        """Steps that the script has finished."""
        return self._watch.steps if self._watch else 0

    def _open_files(self) -> None:
        folder, place = self._plan.output_dir, self._place
        self._manifest = RankManifest(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            device="cpu",
            status="running",
            start=read_clocks(),
        )
        if place.rank == 0:
            run = RunManifest(
                world_size=place.world_size,
                metrics=self._plan.metrics,
                script=str(self._plan.script.resolve()),
                arguments=self._plan.arguments,
                started_wall_ns=time.time_ns(),
                window=self._plan.window,
                versions=versions(),
            )
            write_whole(folder / "manifest.json", encode(run))
        self._ring = Ring(ring_path(folder, place.rank), rank=place.rank)
        self.events = EventLog(folder / "events", rank=place.rank, world_size=place.world_size)
        write_whole(rank_path(folder, place.rank), encode(self._manifest))

    def _on_torch(self) -> None:
        """Attach to torch, which the script has just imported."""
        from ms_profile.capture.scopes import ScopeRecorder
        from ms_profile.capture.tracer import Tracer
        from ms_profile.capture.watch import StepWatch

        self._tracer = Tracer(
            self._plan.output_dir,
            self._place.rank,
            self._plan.window,
            Recording.of(self._plan.metrics),
            on_saved=self._on_trace,
            on_problem=self._loss,
        )
        self._watch = StepWatch(self._ring, self._on_step)
        self._scopes = ScopeRecorder(self._ring)
        if self._tracer.busy(0):
            self._tracer.begin_step(0)

    def _on_step(self, step: int) -> None:
        """Act at the boundary before a step: report the last one, and switch the recorders."""
        self._report_step(step)
        self._trace_step(step)
        # What the recorders took at the boundary is part of no step.
        self._since_ns = time.monotonic_ns()

    def _report_step(self, step: int) -> None:
        now = time.monotonic_ns()
        fields: dict[str, int | float | str] = {
            "step": step - 1,
            "step_time_s": (now - self._since_ns) / 1e9,
        }
        if self._tracer is not None and self._tracer.tracing:
            fields["traced"] = 1
        if now - self._facts_ns >= SLOW_FACTS_NS:
            self._facts_ns = now
            fields |= self._slow_facts()
        self.events("step", fields)

    def _trace_step(self, step: int) -> None:
        if self._tracer is None or self._scopes is None:
            return
        busy = self._tracer.busy(step)
        if busy or self._scopes.due():
            self._scopes.stop()
        self._tracer.begin_step(step)
        self._scopes.begin_step(step)
        if not self._tracer.busy(step):
            try:
                self._scopes.start()
            except (RuntimeError, TypeError, AttributeError) as error:
                self._scopes = None
                self._problem(f"this torch shows no collectives outside the windows: {error}")

    def _slow_facts(self) -> dict[str, int | float | str]:
        """What is asked for about once a second: memory, and the wait for data since the last."""
        facts: dict[str, int | float | str] = {
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        }
        if self._scopes is not None:
            facts["data_wait_s"] = (self._scopes.data_wait_ns - self._data_wait_ns) / 1e9
            self._data_wait_ns = self._scopes.data_wait_ns
        import torch

        if torch.accelerator.is_available():
            facts["memory_bytes"] = torch.accelerator.memory_allocated()
        return facts

    def _save_torch(self) -> None:
        if self._scopes is not None:
            self._scopes.stop()
        if self._watch is not None:
            before = self._watch.steps
            self._watch.close()
            if self._watch.steps > before:
                self._report_step(self._watch.steps)
        if self._tracer is not None:
            try:
                self._tracer.finish()
            except (RuntimeError, OSError) as error:
                self._loss(f"the last window was lost: {error}")

    def _on_trace(self, trace: TraceFile) -> None:
        self._traces.append(trace)
        self.events("trace", {"path": trace.path, "step": trace.first_step, "steps": trace.steps})
        self._write_manifest()

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic_ns()
        if phase == "start":
            self._collecting_ns = now
        elif now - self._collecting_ns >= GARBAGE_NS:
            name = self._ring.name(f"gc generation {info['generation']}")
            self._ring.record(name, Kind.GARBAGE, self._collecting_ns, now)

    def _loss(self, text: str) -> None:
        self.complete = False
        self._problem(text)

    def _problem(self, text: str) -> None:
        self._warnings.append(text)

    def _write_manifest(self, **changes: object) -> None:
        from_torch: dict[str, object] = {"steps": self.steps, "traces": tuple(self._traces)}
        if "torch" in sys.modules and self._tracer is not None:
            from ms_profile.capture.tracer import accelerator

            from_torch["device"] = accelerator()
        self._manifest = msgspec.structs.replace(
            self._manifest,
            warnings=tuple(self._warnings),
            complete=self.complete,
            **from_torch,
            **changes,
        )
        try:
            write_whole(rank_path(self._plan.output_dir, self._place.rank), encode(self._manifest))
        except OSError as error:
            self._loss(f"the manifest of rank {self._place.rank} is out of date: {error}")
