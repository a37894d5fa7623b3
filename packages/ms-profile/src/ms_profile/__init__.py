"""Distributed event log, low-overhead timing, trace analysis, and one report on the time."""

from ms_profile.advice import Finding, advise
from ms_profile.alignment import ClockFit, align_clocks
from ms_profile.analysis import Analysis, RankAnalysis, analyse, analyse_traces
from ms_profile.clock import ClockPair, read_clocks
from ms_profile.comparison import Comparison, compare
from ms_profile.errors import ProfileError
from ms_profile.event_reader import EventFilter, follow_events, read_events
from ms_profile.events import Event, EventLog, StepMetrics
from ms_profile.ledger import Ledger
from ms_profile.link import LinkFit, LinkMatrix, fit_link, measure_links
from ms_profile.links import Verdict, diagnose
from ms_profile.operators import Kernel, Operator, kernel_table, operator_table
from ms_profile.perfetto import export_perfetto
from ms_profile.recorder import Recorder, mark_step
from ms_profile.report import write_report
from ms_profile.ring import Kind, RingRecording, read_ring
from ms_profile.tensorboard import export_tensorboard
from ms_profile.trace import Trace, read_trace

__version__ = "0.1.0"

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
