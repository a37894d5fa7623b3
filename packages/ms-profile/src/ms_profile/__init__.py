"""Distributed event log, low-overhead timing, trace analysis, and one report on the time."""

from ms_profile.alignment import ClockFit, align_clocks
from ms_profile.clock import ClockPair, read_clocks
from ms_profile.errors import ProfileError
from ms_profile.event_reader import EventFilter, follow_events, read_events
from ms_profile.events import Event, EventLog, StepMetrics
from ms_profile.link import LinkFit, LinkMatrix, fit_link, measure_links
from ms_profile.recorder import Recorder, mark_step
from ms_profile.ring import Kind, RingRecording, read_ring
from ms_profile.tensorboard import export_tensorboard

__version__ = "0.1.0"

__all__ = [
    "ClockFit",
    "ClockPair",
    "Event",
    "EventFilter",
    "EventLog",
    "Kind",
    "LinkFit",
    "LinkMatrix",
    "ProfileError",
    "Recorder",
    "RingRecording",
    "StepMetrics",
    "__version__",
    "align_clocks",
    "export_tensorboard",
    "fit_link",
    "follow_events",
    "mark_step",
    "measure_links",
    "read_clocks",
    "read_events",
    "read_ring",
]
