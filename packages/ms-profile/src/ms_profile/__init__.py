"""Distributed event log, low-overhead timing, trace analysis, and one report on the time."""

from ms_profile.advice.finding import Finding
from ms_profile.advice.rules import advise
from ms_profile.analysis.comparison import Comparison, compare
from ms_profile.analysis.ledger import Ledger
from ms_profile.analysis.operators import Kernel, Operator, kernel_table, operator_table
from ms_profile.analysis.transfers import Verdict, diagnose
from ms_profile.analysis.whole_run import Analysis, RankAnalysis, analyse, analyse_traces
from ms_profile.clocks.alignment import ClockFit, align_clocks
from ms_profile.clocks.clock_pair import ClockPair, read_clocks
from ms_profile.errors import ProfileError
from ms_profile.links.fit import LinkFit, fit_link
from ms_profile.links.matrix import LinkMatrix
from ms_profile.links.measure import measure_links
from ms_profile.log.event_log import Event, EventLog, StepMetrics
from ms_profile.log.event_reader import EventFilter, follow_events, read_events
from ms_profile.log.ring import Kind, RingRecording, read_ring
from ms_profile.log.tensorboard import export_tensorboard
from ms_profile.recording.recorder import Recorder, mark_step
from ms_profile.report.page import write_report
from ms_profile.report.perfetto import export_perfetto
from ms_profile.trace.columns import Trace
from ms_profile.trace.reader import read_trace
from ms_profile.version import __version__

__all__ = [
    "Analysis",
    "ClockFit",
    "ClockPair",
    "Comparison",
    "Event",
    "EventFilter",
    "EventLog",
    "Finding",
    "Kernel",
    "Kind",
    "Ledger",
    "LinkFit",
    "LinkMatrix",
    "Operator",
    "ProfileError",
    "RankAnalysis",
    "Recorder",
    "RingRecording",
    "StepMetrics",
    "Trace",
    "Verdict",
    "__version__",
    "advise",
    "align_clocks",
    "analyse",
    "analyse_traces",
    "compare",
    "diagnose",
    "export_perfetto",
    "export_tensorboard",
    "fit_link",
    "follow_events",
    "kernel_table",
    "mark_step",
    "measure_links",
    "operator_table",
    "read_clocks",
    "read_events",
    "read_ring",
    "read_trace",
    "write_report",
]
