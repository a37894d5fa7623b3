"""Drawings match the timeline and are well-formed."""

from xml.etree import ElementTree

import pytest
from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import (
    Costs,
    Schedule,
    draw_html,
    draw_svg,
    draw_text,
    dualpipe_v,
    gpipe,
    measured,
    one_f_one_b,
    simulate,
    zb_v,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_the_terminal_drawing_is_the_expected_one():
    """GPipe with 2 stages and 2 microbatches and B = 2F: 9 time units, B twice as long."""
    line = simulate(gpipe(2, 2), Costs.uniform(2))
    assert draw_text(line, width=45) == (
        "GPipe, 2 ranks, 2 stages, 2 microbatches: makespan 9, bubble 33.33%\n"
        "rank 0   |FF···BBBB| idle 33.3%, peak 2\n"
        "rank 1   |·FFBBBB··| idle 33.3%, peak 2\n"
    )


def test_later_stages_are_lower_case_and_colors_are_optional():
    """On a V, rank 1 starts with a capital F followed by a lower-case one."""
    line = simulate(zb_v(2, 3), Costs.uniform(4))
    assert "·Ff" in draw_text(line, width=36 + int(line.makespan))
    assert "\x1b[" not in draw_text(line)
    assert "\x1b[34mF\x1b[0m" in draw_text(line, color=True)


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_v(2, 4), dualpipe_v(2, 4)])
def test_the_svg_has_a_box_for_each_computation(schedule):
    """Well-formed XML; widths sum to the busy time, and red edges mark the critical path."""
    line = simulate(schedule, Costs.uniform(schedule.stages, latency=0.5))
    root = ElementTree.fromstring(draw_svg(line, width=1210))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == sum(map(len, line.spans))
    scale = 1000 / float(line.makespan)
    total_width = sum(float(box.get("width")) for box in boxes)
    # Each width is rounded to a hundredth of a pixel.
    assert total_width == pytest.approx(float(sum(line.busy)) * scale, abs=0.01 * len(boxes))
    red = [box for box in boxes if box.get("stroke") == "#d93025"]
    assert len(red) == len(line.critical_path)


@pytest.mark.parametrize(("longest", "step"), [(9, 1), (130, 10), (0.031, 0.002), (2500, 200)])
def test_the_axis_has_round_marks_that_match_the_boxes(longest, step):
    """Marks at multiples of 1, 2 or 5 times a power of ten; the last box ends at its time."""
    line = simulate(gpipe(1, 1), Costs.uniform(1, forward=longest, backward_input=0,
                                               backward_weight=0))  # fmt: skip
    root = ElementTree.fromstring(draw_svg(line, width=1210, unit="ms"))
    texts = [text for text in root.iter(f"{SVG}text") if text.get("fill") == "#5f6368"]
    marks = {float(text.text): float(text.get("x")) for text in texts[:-1]}
    assert list(marks) == pytest.approx([n * step for n in range(int(longest / step + 1e-6) + 1)])
    assert all(x == pytest.approx(60 + 1000 * at / longest, abs=0.01) for at, x in marks.items())
    assert texts[-1].text == "time, ms"
    assert "time, unit of the costs" in draw_svg(line)


def test_a_measured_run_is_drawn_with_the_simulated_one():
    """With simulated times the measured timeline is equal; a later end makes it longer."""
    line = simulate(one_f_one_b(2, 3), Costs.uniform(2))
    times = [[(span.start + 0.25, span.end + 0.25) for span in row] for row in line.spans]
    measured_line = measured(line.schedule, times)
    assert measured_line.makespan == line.makespan
    assert measured_line.bubble == line.bubble
    assert measured_line.critical_path[-1][1].end == measured_line.end
    times[1][-1] = (times[1][-1][0], times[1][-1][1] + 9)
    slow = measured(line.schedule, times)
    assert slow.makespan > line.makespan
    picture = draw_svg(line, slow, titles=["simulated", "measured"])
    assert "simulated: 1F1B" in picture
    assert "measured: 1F1B" in picture
    with pytest.raises(ScheduleError, match=r"measured \[6, 5\] computations"):
        measured(line.schedule, [times[0], times[1][:-1]])


def test_actions_without_computation_are_not_drawn_or_timed():
    """A table with gathers and reductions is simulated, drawn and measured like one without."""
    text = "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    named, plain = (
        simulate(Schedule.from_csv(table), Costs.uniform(1)) for table in (text, "0F0,0F1,0B0,0B1")
    )
    assert named.spans == plain.spans
    assert draw_svg(named) == draw_svg(plain)
    assert draw_text(named) == draw_text(plain)
    times = [[(span.start, span.end) for span in row] for row in named.spans]
    assert measured(named.schedule, times).spans == plain.spans
    assert named.schedule.to_csv(communication=False) == text


def test_a_pair_is_timed_sequentially():
    """A pair takes the sum of its two actions, and the legend says so."""
    costs = Costs.uniform(4)
    paired = dualpipe_v(2, 8)
    rows = [[part for action in row for part in action.flat] for row in paired.computations()]
    unpaired = Schedule.from_computations(rows, paired.placement, paired.microbatches)
    assert any(action.parts for row in paired.actions for action in row)
    assert simulate(paired, costs).busy == simulate(unpaired, costs).busy
    assert simulate(paired, costs).makespan >= simulate(unpaired, costs).makespan
    assert "pair, run one after the other" in draw_svg(simulate(paired, costs))


def test_a_page_is_self_contained_and_escapes_names():
    """No script, no link, and no markup from a schedule's name."""
    line = simulate(evolve(one_f_one_b(2, 2), name="<script>x</script>"), Costs.uniform(2))
    page = draw_html(line)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "href" not in page
    assert "Critical path: rank 0: 0F0" in page


@pytest.mark.parametrize("width", [404, 1200])
def test_a_drawing_fits_its_width(width):
    """On a phone titles wrap and facts are below their row; letters take 8 pixels."""
    line = simulate(zb_v(4, 8), Costs.uniform(8, latency=0.1))
    root = ElementTree.fromstring(
        draw_svg(line, line, titles=["simulated", "measured"], width=width)
    )
    assert int(root.get("width")) == width
    assert "max-width:100%" in root.get("style")
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= width
    for text in root.iter(f"{SVG}text"):
        letter = 7.6 if text.get("font-size") == "14" else 6.0
        share = {"middle": 0.5, "end": 0.0}.get(text.get("text-anchor"), 1.0)
        assert float(text.get("x")) + share * letter * len(text.text) <= width + 8
        assert float(text.get("y")) <= int(root.get("height"))


def test_a_drawing_has_a_legend_and_a_dark_mode():
    """The legend has the kinds that are drawn, no others, and the red edge."""
    picture = draw_svg(simulate(zb_v(2, 4), Costs.uniform(4)))
    assert "forward (lighter: later stages)" in picture
    assert "weight backward" in picture
    assert "critical path" in picture
    assert "full backward" not in picture
    plain = draw_svg(simulate(one_f_one_b(2, 4), Costs.uniform(2)))
    assert "full backward" in plain
    assert "lighter" not in plain
    assert "@media (prefers-color-scheme: dark)" in plain


def test_a_page_has_a_drawing_for_phones():
    """It is 420 pixels wide with its margins, and shown instead of the wide one."""
    page = draw_html(simulate(zb_v(2, 4), Costs.uniform(4)))
    assert '<svg xmlns="http://www.w3.org/2000/svg" width="404"' in page
    assert ".wide { display: none } .phone { display: block }" in page
    assert 'name="viewport"' in page
