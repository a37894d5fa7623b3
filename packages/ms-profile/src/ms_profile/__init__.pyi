"""The public names; `__init__.py` imports each when it is first asked for."""

from .advice.finding import Finding
from .advice.rules import advise
from .analysis.comparison import Comparison, compare
from .analysis.ledger import Ledger
from .analysis.memory_use import MemoryUse, analyse_memory
from .analysis.operators import Kernel, Operator, kernel_table, operator_table
from .analysis.transfers import Verdict, diagnose
from .analysis.whole_run import Analysis, RankAnalysis, analyse, analyse_traces
from .clocks.alignment import ClockFit, align_clocks
from .clocks.clock_pair import ClockPair, read_clocks
from .doctor.cluster import measure_cluster
from .errors import ProfileError
from .links.fit import LinkFit, fit_link
from .links.matrix import LinkMatrix
from .links.measure import measure_links
from .log.event_log import Event, EventLog, StepMetrics
from .log.event_reader import EventFilter, follow_events, read_events
from .log.ring import Kind, RingRecording, read_ring
from .log.tensorboard import export_tensorboard
from .recording.recorder import Recorder, mark_step
from .report.page import write_memory_page, write_report
from .report.perfetto import export_perfetto
from .trace.columns import Trace
from .trace.reader import read_trace

__version__: str

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
    "MemoryUse",
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
    "analyse_memory",
    "analyse_traces",
    "compare",
    "diagnose",
    "export_perfetto",
    "export_tensorboard",
    "fit_link",
    "follow_events",
    "kernel_table",
    "mark_step",
    "measure_cluster",
    "measure_links",
    "operator_table",
    "read_clocks",
    "read_events",
    "read_ring",
    "read_trace",
    "write_memory_page",
    "write_report",
]
