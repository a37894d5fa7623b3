"""Recording session of one process: record while the script runs, save however it ends."""

import os
import resource
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from ms_profile.clocks.clock_pair import read_clocks
from ms_profile.errors import CaptureError, RecordError, number_in_environment
from ms_profile.log.event_log import EventLog, Value
from ms_profile.log.manifest import (
    RankManifest,
    RunManifest,
    TraceFile,
    encode,
    rank_path,
    ring_path,
    write_atomically,
)
from ms_profile.metrics import Collect, collected_for
from ms_profile.recording.cpu_wait import CpuWait
from ms_profile.recording.import_hook import when_imported
from ms_profile.recording.plan import Plan, ProcessRank, versions
from ms_profile.recording.recorder import Recorder
from ms_profile.secret_text import mask_arguments, without_secrets

if TYPE_CHECKING:
    from ms_profile.recording.tracer import WindowTracer

MAX_COLLECTIVES: Final = "4096"
SLOW_METRICS_NS: Final = 1_000_000_000


OPEN: Final[list["Session"]] = []
"""The open session of this process, if any."""


def _abandon_in_child() -> None:
    for session in tuple(OPEN):
        session.abandon()


def _count_fork() -> None:
    for session in OPEN:
        session.forks += 1


os.register_at_fork(after_in_parent=_count_fork, after_in_child=_abandon_in_child)


class Session:
    """Record this process until `finish`; child processes that it forks are not recorded.

    Raises:
        CaptureError: the output folder already has another run.
        RecordError: the output folder cannot be written.
    """

    def __init__(self, plan: Plan, process: ProcessRank) -> None:
        self._plan, self._process = plan, process
        self._collect = collected_for(plan.metrics)
        # torchrun restarts failed ranks into the same folder.
        restarted = number_in_environment("TORCHELASTIC_RESTART_COUNT", 0) > 0
        if rank_path(plan.output_dir, process.rank).exists() and not restarted:
            raise CaptureError(
                f"{plan.output_dir} already has a run; choose another --output-dir, "
                "or pass --overwrite"
            )
        self.complete = True
        """Whether the recording has no gaps so far."""
        self._warnings: list[str] = []
        self._traces: list[TraceFile] = []
        self._tracer: WindowTracer | None = None
        self._finished = self._window_ended = False
        self.forks = 0
        """Number of times that the script forked this process."""
        try:
            self._open_files()
        except OSError as error:
            raise RecordError(f"cannot write to {plan.output_dir}: {error}") from error
        self._since_ns = self._metrics_ns = time.monotonic_ns()
        self._data_wait_s = 0.0
        self._cpu_wait = CpuWait()
        host = self.manifest.host
        self.events("run_start", {"script": str(plan.script), "host": host, "pid": os.getpid()})
        if process.world_size > 1 and Collect.GROUPS in self._collect:
            # Read when torch is imported: enables the flight recorder; see `flight_recorder`.
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", MAX_COLLECTIVES)
        OPEN.append(self)
        when_imported("torch", self._on_torch)

    def finish(self, exit_code: int, error: str | None) -> None:
        """Save everything and stop recording; later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        error = None if error is None else without_secrets(error)
        OPEN.remove(self)
        self._finish_recording()
        self._cpu_wait.close()
        self.events("run_end", {"exit_code": exit_code, "error": error or ""})
        # Closed before the manifest is written, which reports the events that were lost.
        self.events.close()
        if self.events.lost:
            self._loss(f"{self.events.lost} events could not be written; is the disk full?")
        self._check_files()
        self._write_manifest(
            status="failed" if exit_code else "done",
            exit_code=exit_code,
            error=error,
            end=read_clocks(),
        )

    def _check_files(self) -> None:
        """Warn about files of the run that were removed while it was being recorded."""
        folder, rank = self._plan.output_dir, self._process.rank
        paths = [rank_path(folder, rank), ring_path(folder, rank), self.events.path]
        paths += [folder / trace.path for trace in self._traces]
        paths += [folder / "manifest.json"] if rank == 0 else []
        removed = [path.relative_to(folder).as_posix() for path in paths if not path.is_file()]
        if removed:
            self._loss(
                f"{', '.join(removed)} of {folder} were removed while the script ran and their "
                "contents are lost; choose an --output-dir that nothing else clears"
            )

    def abandon(self) -> None:
        """Stop silently in a forked child; the parent keeps recording."""
        self._finished = True
        OPEN.remove(self)
        self._cpu_wait.close()
        if self._tracer is not None:
            self._tracer.abandon()

    def _open_files(self) -> None:
        folder, process = self._plan.output_dir, self._process
        self.manifest = RankManifest(
            rank=process.rank,
            local_rank=process.local_rank,
            world_size=process.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            device="cpu",
            status="running",
            start=read_clocks(),
        )
        """Manifest of this rank, as last written."""
        if process.rank == 0:
            write_atomically(folder / "manifest.json", encode(self._run_manifest()))
        path = ring_path(folder, process.rank)
        self._recorder = Recorder(
            path, rank=process.rank, on_step=self._on_step, on_update=self._on_update
        )
        self.events = EventLog(folder / "events", rank=process.rank, world_size=process.world_size)
        # Last, so that a rank with a manifest has a ring and an event log.
        write_atomically(rank_path(folder, process.rank), encode(self.manifest))

    def _run_manifest(self) -> RunManifest:
        return RunManifest(
            world_size=self._process.world_size,
            metrics=self._plan.metrics,
            script=str(self._plan.script.resolve()),
            arguments=mask_arguments(self._plan.arguments),
            started_wall_ns=time.time_ns(),
            schedule=self._plan.schedule,
            versions=versions(),
        )

    def _on_torch(self) -> None:
        """Attach to torch right after the script has imported it."""
        if self._finished:  # in a child that was forked before torch was imported
            return
        from ms_profile.recording.tracer import WindowTracer

        self._tracer = WindowTracer(
            self._plan.output_dir,
            self._process.rank,
            self._plan.schedule,
            self._collect,
            on_saving=self.events.flush,
            on_saved=self._on_trace,
            on_problem=self._loss,
        )
        self._recorder.attach()
        if self._tracer.busy(0):
            self._tracer.begin_step(0)

    def _on_update(self) -> None:
        """End the Kineto session that is due to end with this step; see `recording.scopes`."""
        if self._tracer is None:
            return
        step, start_ns = self._recorder.steps, time.monotonic_ns()
        if self._tracer.busy(step + 1) or self._tracer.busy(step + 2):
            self._recorder.release_kineto()
        if self._tracer.tracing:
            self._tracer.end_update(step)
            self._window_ended = not self._tracer.tracing
        # Time spent saving does not belong to any step.
        self._since_ns += time.monotonic_ns() - start_ns

    def _on_step(self, step: int) -> None:
        """Report the step that just ended and switch the tracer for the one that begins."""
        self._report_step(step - 1)
        if self._tracer is not None:
            # Two Kineto sessions must be at least one step apart; see `recording.scopes`.
            window_near = self._tracer.busy(step) or self._tracer.busy(step + 1)
            window_ended, self._window_ended = self._window_ended, False
            if window_near:
                self._recorder.release_kineto()
            self._tracer.begin_step(step)
            self._recorder.kineto_free = not (window_near or window_ended)
        # Time spent recording at the boundary does not belong to any step.
        self._since_ns = time.monotonic_ns()

    def _report_step(self, step: int, *, last: bool = False) -> None:
        now_ns = time.monotonic_ns()
        fields: dict[str, Value] = {"step": step, "step_time_s": (now_ns - self._since_ns) / 1e9}
        if (cpu_wait_ns := self._cpu_wait.since_last_ns()) is not None:
            fields["cpu_wait_s"] = cpu_wait_ns / 1e9
        if self._window_ended or (self._tracer is not None and self._tracer.tracing):
            fields["traced"] = 1
        if last or now_ns - self._metrics_ns >= SLOW_METRICS_NS:
            self._metrics_ns = now_ns
            fields |= self._slow_metrics()
        self.events("step", fields)

    def _slow_metrics(self) -> dict[str, Value]:
        """Return memory and data waits, which are reported once per second and at the end.

        Waits are collected every few seconds; each report has those since the previous report.
        """
        import torch

        metrics: dict[str, Value] = {}
        if Collect.DATA_WAITS in self._collect:
            data_wait_s = self._recorder.data_wait_s
            metrics["data_wait_s"] = data_wait_s - self._data_wait_s
            self._data_wait_s = data_wait_s
        if Collect.MEMORY not in self._collect:
            return metrics
        # Linux reports KiB.
        metrics["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.accelerator.is_available():
            metrics["memory_bytes"] = torch.accelerator.memory_allocated()
        return metrics

    def _finish_recording(self) -> None:
        previous_steps = self._recorder.steps
        self._recorder.close()
        # Closing counts the last step if its update was done, which nothing has reported yet.
        if self._recorder.steps > previous_steps:
            self._report_step(previous_steps, last=True)
        if self._recorder.problem is not None:
            self._warnings.append(self._recorder.problem)
        if self.forks and not self._recorder.steps:
            self._warnings.append(
                "processes that the script forked are not recorded; start its ranks with "
                "--nproc-per-node or torchrun"
            )
        if self._tracer is not None:
            try:
                self._tracer.finish()
            except (RuntimeError, OSError) as error:
                self._loss(f"the last traced window was lost: {error}")

    def _on_trace(self, trace: TraceFile) -> None:
        self._traces.append(trace)
        self.events("trace", {"path": trace.path, "step": trace.first_step, "steps": trace.steps})
        self._write_manifest()

    def _loss(self, text: str) -> None:
        self.complete = False
        if text not in self._warnings:
            self._warnings.append(text)

    def _write_manifest(self, **changes: object) -> None:
        if "torch" in sys.modules and self._tracer is not None:
            from ms_profile.recording.tracer import accelerator

            changes["device"] = accelerator()
        self.manifest = msgspec.structs.replace(
            self.manifest,
            steps=self._recorder.steps,
            traces=tuple(self._traces),
            warnings=tuple(self._warnings),
            complete=self.complete,
            **changes,
        )
        try:
            write_atomically(
                rank_path(self._plan.output_dir, self._process.rank), encode(self.manifest)
            )
        except OSError as error:
            self._loss(f"the manifest of rank {self._process.rank} is out of date: {error}")
            warnings = tuple(self._warnings)
            self.manifest = msgspec.structs.replace(
                self.manifest, warnings=warnings, complete=False
            )
