"""Pipeline schedules as values: generated, simulated, searched, verified, read and written.

This package is pure: it does not import torch or start processes.
"""

from ms_parallel.schedules.checks.verify import Report, verify
from ms_parallel.schedules.drawing.page import draw_html
from ms_parallel.schedules.drawing.svg import draw_svg
from ms_parallel.schedules.drawing.text import draw_text, path_text
from ms_parallel.schedules.generators.looped.breadth_first import breadth_first
from ms_parallel.schedules.generators.looped.interleaved import interleaved_one_f_one_b
from ms_parallel.schedules.generators.one_stage.gpipe import gpipe
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.generators.one_stage.zb_h import zb_h1, zb_h2
from ms_parallel.schedules.generators.one_stage.zb_p import zb1p, zb2p
from ms_parallel.schedules.generators.registry import GENERATORS, named_schedule
from ms_parallel.schedules.generators.vee.dualpipe_v import dualpipe_v
from ms_parallel.schedules.generators.vee.v_memory import v_half, v_min
from ms_parallel.schedules.generators.vee.zb_v import zb_v
from ms_parallel.schedules.solver.balance import Balanced, balance
from ms_parallel.schedules.solver.search import Found, search
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.communication import with_communication
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.event_simulation import Span
from ms_parallel.schedules.table.placements import looped, one_a_rank, vee
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.table.segments import SegmentCosts
from ms_parallel.schedules.timeline.measured import measured, measured_costs
from ms_parallel.schedules.timeline.simulate import Timeline, simulate

__all__ = [
    "GENERATORS",
    "Action",
    "Balanced",
    "Costs",
    "Found",
    "Kind",
    "Report",
    "Schedule",
    "SegmentCosts",
    "Span",
    "Timeline",
    "balance",
    "breadth_first",
    "draw_html",
    "draw_svg",
    "draw_text",
    "dualpipe_v",
    "gpipe",
    "interleaved_one_f_one_b",
    "looped",
    "measured",
    "measured_costs",
    "named_schedule",
    "one_a_rank",
    "one_f_one_b",
    "path_text",
    "search",
    "simulate",
    "v_half",
    "v_min",
    "vee",
    "verify",
    "with_communication",
    "zb1p",
    "zb2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
