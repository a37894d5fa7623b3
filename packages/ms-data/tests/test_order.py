"""The order of samples is a permutation, stateless and well mixed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data.streams.order import ROUNDS, Order, permute


def epoch_of(order: Order, epoch: int) -> list[int]:
    """All samples of an epoch, in order."""
    windows = -(-order.samples // order.window_samples)
    return [int(one) for number in range(windows) for one in order.window(epoch, number)]


orders = st.builds(
    Order,
    samples=st.integers(1, 400),
    seed=st.integers(-(2**70), 2**70),
    chunk_samples=st.integers(1, 50),
    window_chunks=st.integers(1, 20),
    shuffle=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(order=orders, epoch=st.integers(0, 2**40))
def test_every_epoch_delivers_each_sample_once(order: Order, epoch: int) -> None:
    """For any size, chunk and window an epoch is a permutation of the samples."""
    assert sorted(epoch_of(order, epoch)) == list(range(order.samples))


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_permute_is_a_bijection(size: int, seed: int) -> None:
    """Every value of range(size) has one image in it."""
    keys = np.random.default_rng(seed).integers(0, 2**64, ROUNDS, dtype=np.uint64)
    images = permute(np.arange(size, dtype=np.uint64), size, keys)
    assert sorted(images.tolist()) == list(range(size))


def test_permute_reaches_every_place_equally_often() -> None:
    """Over many keys each value of 5 lands on each place a fifth of the time.

    20,000 draws: a share of 0.2 has a standard deviation of 0.0028; six of them are 0.017.
    """
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, (ROUNDS, 20_000, 1), dtype=np.uint64)
    # Of 5 values the grid has 6 cells, as of 6, none of which is sent round again: so all keys are
    # taken at once, and what falls on the sixth is sent round here.
    grid = permute(np.tile(np.arange(6, dtype=np.uint64), (20_000, 1)), 6, keys)
    images = grid[:, :5]
    while (outside := images == 5).any():
        images = np.where(outside, grid[:, 5:], images)
    for row in range(500):
        assert (permute(np.arange(5, dtype=np.uint64), 5, keys[:, row, 0]) == images[row]).all()
    for place in range(5):
        shares = np.bincount(images[:, place].astype(int), minlength=5) / len(images)
        assert np.abs(shares - 0.2).max() < 0.017


def test_all_orders_of_four_values_occur_equally_often() -> None:
    """Each of the 24 permutations has its share: places are not only fair one by one.

    48,000 draws: a share of 1/24 has a standard deviation of 0.0009; six of them are 0.0055.
    """
    rng = np.random.default_rng(2)
    start = np.tile(np.arange(4, dtype=np.uint64), (48_000, 1))
    keys = rng.integers(0, 2**64, (ROUNDS, 48_000, 1), dtype=np.uint64)
    # The grid has four cells: no value is sent round again, so each row may have keys of its own.
    _, counts = np.unique(permute(start, 4, keys), axis=0, return_counts=True)
    assert len(counts) == 24
    assert np.abs(counts / 48_000 - 1 / 24).max() < 0.0055


def test_neighbors_do_not_stay_together() -> None:
    """After a shuffle of 100,000 samples few neighbors in the order are neighbors on disk.

    Of a random permutation about 2 neighbors in all are; chunks of 10 in windows of 1,000
    chunks mix 10,000 samples, where about 2 in each window are: some 20.
    """
    order = Order(samples=100_000, chunk_samples=10, window_chunks=1000)
    steps = np.diff(np.array(epoch_of(order, 0)))
    assert int((np.abs(steps) == 1).sum()) < 60


def test_seeds_and_epochs_give_other_orders() -> None:
    """Two seeds, and two epochs of one seed, agree in no more places than chance has it."""
    orders = [
        np.array(epoch_of(Order(samples=5000, seed=seed, window_chunks=5000), epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert int((one == other).sum()) < 12


def test_windows_hold_few_chunks() -> None:
    """A window of w chunks touches at most w + 1, so a reader's memory is bounded."""
    order = Order(samples=10_007, seed=3, chunk_samples=13, window_chunks=7)
    for number in range(10_007 // order.window_samples + 1):
        assert len(set(order.window(0, number) // 13)) <= 8


def test_the_order_is_frozen() -> None:
    """Saved states stay good: this order must never change under its name."""
    order = Order(samples=23, seed=7, chunk_samples=3, window_chunks=3)
    frozen = "22 0 13 12 14 21 17 16 15 10 9 2 11 18 3 1 4 5 19 8 7 20 6"
    assert " ".join(map(str, epoch_of(order, 2))) == frozen


def test_a_window_far_away_needs_no_table() -> None:
    """Ten to the fifteenth samples need no table, which no memory would hold."""
    order = Order(samples=10**15, chunk_samples=128)
    window = order.window(3, 10**15 // order.window_samples - 1)
    assert len(set(window.tolist())) == order.window_samples
    assert window.min() >= 0
    assert window.max() < 10**15
