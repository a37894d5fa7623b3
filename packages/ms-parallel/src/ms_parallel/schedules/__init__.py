"""Pipeline schedules as values: generated, verified before a process starts, read and written.

Pure: nothing here imports torch or starts anything.
"""

from ms_parallel.schedules.checks.verify import Report, verify
from ms_parallel.schedules.drawing.draw import draw_html, draw_svg, draw_text, path_text
from ms_parallel.schedules.generators.looped.breadth_first import breadth_first
from ms_parallel.schedules.generators.looped.interleaved import interleaved_one_f_one_b
from ms_parallel.schedules.generators.one_stage.gpipe import gpipe
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.generators.one_stage.zb1p import zb1p
from ms_parallel.schedules.generators.one_stage.zb2p import zb2p
from ms_parallel.schedules.generators.one_stage.zb_h1 import zb_h1
from ms_parallel.schedules.generators.one_stage.zb_h2 import zb_h2
from ms_parallel.schedules.generators.registry import GENERATORS, named_schedule
from ms_parallel.schedules.generators.vee.dualpipe_v import dualpipe_v
from ms_parallel.schedules.generators.vee.v_half import v_half
from ms_parallel.schedules.generators.vee.v_min import v_min
from ms_parallel.schedules.generators.vee.zb_v import zb_v
from ms_parallel.schedules.solver.balance import Balanced, LayerCosts, balance
from ms_parallel.schedules.solver.search import Found, search
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.communication import with_communication
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import looped, one_a_rank, vee
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.measured import observed, observed_costs
from ms_parallel.schedules.timeline.simulate import Span, Timeline, measured, simulate

__all__ = [
    "GENERATORS",
    "Action",
    "Balanced",
    "Costs",
    "Found",
    "Kind",
    "LayerCosts",
    "Report",
    "Schedule",
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
    "named_schedule",
    "observed",
    "observed_costs",
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
