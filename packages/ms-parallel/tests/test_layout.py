"""Layouts map ranks to places, and are refused with the sizes that fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_parallel.cluster.layout import AXES, Layout, ModelShape, Place
from ms_parallel.cluster.partial_layout import PartialLayout
from ms_parallel.errors import LayoutError
from ms_parallel.training.inspection import MAX_WIDTH, picture

SIZES = st.integers(min_value=1, max_value=5)
LAYOUTS = st.builds(Layout, data=SIZES, tensor=SIZES, pipeline=SIZES, context=SIZES)
SHAPE = ModelShape(
    layers=6,
    attention_heads=8,
    key_value_heads=4,
    hidden_size=256,
    intermediate_size=704,
    vocab_size=8192,
)


@given(LAYOUTS)
def test_every_rank_has_a_unique_place(layout: Layout) -> None:
    """`place` is a bijection from ranks to places, and `rank` is its inverse."""
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))


@given(LAYOUTS)
def test_tensor_is_the_innermost_axis_and_pipeline_the_outermost(layout: Layout) -> None:
    """Neighboring ranks differ on the tensor axis; stages are contiguous ranges of ranks."""
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert places == sorted(places, key=lambda p: (p.pipeline, p.data, p.context, p.tensor))


@given(LAYOUTS)
def test_a_layout_is_read_back_from_its_text(layout: Layout) -> None:
    """`parse` inverts `str`."""
    assert Layout.parse(str(layout)) == layout


@given(LAYOUTS)
def test_both_spellings_of_an_axis_mean_the_same(layout: Layout) -> None:
    """`tensor_parallel` and `tensor` are the same key."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    spelled = {f"{axis}_parallel": size for axis, size in sizes.items()}
    assert Layout.from_config(sizes) == Layout.from_config(spelled) == layout


def test_experts_are_split_over_ranks_with_different_tokens() -> None:
    """The expert axis adds no ranks; the remaining factor shards equal experts."""
    layout = Layout.parse("data=4,context=2,tensor=2,expert=4")
    assert layout == Layout.from_config(
        {"data": 4, "context": 2, "tensor": 2, "expert_parallel": 4}
    )
    assert str(layout) == "data=4,tensor=2,context=2,expert=4"
    assert (layout.world_size, layout.token_ranks, layout.expert_shards) == (16, 8, 2)


def test_replicas_are_split_over_ranks_with_different_tokens() -> None:
    """Within each replica, weights are sharded and experts are split."""
    layout = Layout.parse("data=8,expert=2,replicate=2")
    assert str(layout) == "data=8,expert=2,replicate=2"
    assert (layout.world_size, layout.shards, layout.expert_shards) == (8, 4, 2)


def test_a_rank_or_place_outside_the_layout_is_refused() -> None:
    """Both ranks and coordinates are checked."""
    layout = Layout(data=2, tensor=2)
    for rank in (-1, 4):
        with pytest.raises(LayoutError, match=r"outside 0\.\.3"):
            layout.place(rank)
    with pytest.raises(LayoutError, match="tensor coordinate 2"):
        layout.rank(Place(tensor=2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_paralel": 2}, "did you mean 'tensor_parallel'"),
        ({"dat": 2}, "did you mean 'data'"),
        ({"zzz": 2}, "known axes: data, tensor, pipeline"),
        ({"tensor": 2, "tensor_parallel": 2}, "twice"),
        ({"tensor": 0}, "at least 1"),
        ({"tensor": 2.0}, "whole number"),
        ({"tensor": True}, "whole number"),
        ({"tensor": "2"}, "whole number"),
        ({"context": 0}, "at least 1"),
        ({"expert_parallel": 2}, "expert=2 does not divide the 1 ranks of data and context"),
        ({"data": 3, "context": 2, "expert": 4}, "set data=4, or expert to a divisor of 6"),
    ],
)
def test_a_bad_configuration_is_refused_with_a_remedy(
    config: dict[str, object], message: str
) -> None:
    """The one-line error names the key or value and what fits."""
    with pytest.raises(LayoutError, match=message) as caught:
        Layout.from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("data=2,data=2", "twice"), ("data", "axis=number"), ("data=two", "axis=number")],
)
def test_a_bad_text_is_refused(text: str, message: str) -> None:
    """The part that is not axis=number is named."""
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


def test_a_wrong_number_of_processes_is_refused_with_a_remedy() -> None:
    """The remedy is the number of processes to start, or the data size that fits."""
    layout = Layout(data=2, tensor=2)
    layout.check_world(4)
    with pytest.raises(LayoutError, match="set data=4 or start 4 processes"):
        layout.check_world(8)
    with pytest.raises(LayoutError, match=r"but 3 run; start 4 processes"):
        layout.check_world(3)


@given(LAYOUTS)
def test_a_model_is_refused_exactly_if_a_size_does_not_divide(layout: Layout) -> None:
    """Exactly the values that the error suggests pass."""
    fits = layout.tensor in (1, 2, 4) and layout.pipeline <= 6
    if fits:
        layout.check_model(SHAPE)
        return
    with pytest.raises(LayoutError, match=r"values that fit: 1(, 2, 4| to 6)"):
        layout.check_model(SHAPE)


@given(LAYOUTS)
def test_the_rest_of_the_processes_is_on_data(layout: Layout) -> None:
    """For any number of processes that the other axes divide."""
    others = {"tensor_parallel": layout.tensor, "pipeline": layout.pipeline}
    rest = PartialLayout.of({"data": "rest", **others, "context": layout.context})
    assert rest is not None
    assert rest.fill(layout.world_size) == layout
    multiple = layout.world_size // layout.data
    if multiple > 1:
        with pytest.raises(LayoutError, match=f"a multiple of {multiple} processes, but"):
            rest.fill(layout.world_size + 1)


def test_only_data_can_be_rest_and_other_axes_are_checked() -> None:
    """Axes that group data ranks are checked once the number of data ranks is known."""
    assert PartialLayout.of({"data": 2, "tensor": 2}) is None
    rest = PartialLayout.of({"data_parallel": "rest", "expert": 4})
    assert rest is not None
    assert str(rest) == "data=rest,expert=4"
    assert rest.fill(8) == Layout(data=8, expert=4)
    with pytest.raises(LayoutError, match="expert=4 does not divide"):
        rest.fill(2)
    with pytest.raises(LayoutError, match="unknown layout axis 'tensr'"):
        PartialLayout.of({"data": "rest", "tensr": 2})
    with pytest.raises(LayoutError):
        Layout.from_config({"tensor": "rest"})


@given(
    st.builds(
        Layout,
        data=st.integers(1, 4096),
        pipeline=st.integers(1, 64),
        tensor=st.integers(1, 64),
        context=st.integers(1, 64),
    )
)
def test_the_picture_of_a_layout_is_no_wider_than_a_line(layout: Layout) -> None:
    """For any number of ranks."""
    assert max(map(len, picture(layout).splitlines())) <= MAX_WIDTH
