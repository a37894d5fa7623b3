"""The sample order is a stateless, well-mixed permutation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data.streams.order import ROUNDS, Order, permute


def epoch_order(order: Order, epoch: int) -> list[int]:
    """Return all samples of an epoch in order."""
    windows = -(-order.samples // order.window_samples)
    return [int(sample) for number in range(windows) for sample in order.window(epoch, number)]


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
    """For any size, chunk and window."""
    assert sorted(epoch_order(order, epoch)) == list(range(order.samples))


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_permute_is_a_bijection(size: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 2**64, ROUNDS, dtype=np.uint64)
    images = permute(np.arange(size, dtype=np.uint64), size, keys)
    assert sorted(images.tolist()) == list(range(size))


def test_permute_is_uniform_over_positions() -> None:
    """Over many keys, each of 5 values lands on each position a fifth of the time.

    20,000 draws: a fraction of 0.2 has a standard deviation of 0.0028; six are 0.017.
    """
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, (ROUNDS, 20_000, 1), dtype=np.uint64)
    # For 5 values permute uses a grid of 6 cells and repeats results outside. With 6 values nothing
    # is repeated, so all keys run in one call, and the loop below repeats those on the sixth cell.
    grid = permute(np.tile(np.arange(6, dtype=np.uint64), (20_000, 1)), 6, keys)
    images = grid[:, :5]
    while (outside := images == 5).any():
        images = np.where(outside, grid[:, 5:], images)
    for row in range(500):
        assert (permute(np.arange(5, dtype=np.uint64), 5, keys[:, row, 0]) == images[row]).all()
    for position in range(5):
        shares = np.bincount(images[:, position].astype(int), minlength=5) / len(images)
        assert np.abs(shares - 0.2).max() < 0.017


def test_permute_is_uniform_over_permutations() -> None:
    """Each of the 24 permutations of 4 values has its share, not just each position.

    48,000 draws: a fraction of 1/24 has a standard deviation of 0.0009; six are 0.0055.
    """
    rng = np.random.default_rng(2)
    values = np.tile(np.arange(4, dtype=np.uint64), (48_000, 1))
    keys = rng.integers(0, 2**64, (ROUNDS, 48_000, 1), dtype=np.uint64)
    # The grid has four cells, so nothing is repeated and each row can have a separate key.
    _, counts = np.unique(permute(values, 4, keys), axis=0, return_counts=True)
    assert len(counts) == 24
    assert np.abs(counts / 48_000 - 1 / 24).max() < 0.0055


def test_shuffling_separates_neighbors() -> None:
    """Few of 100,000 samples that are neighbors in the order are neighbors on disk.

    A random permutation has about 2 in all. Chunks of 10 in windows of 1,000 chunks mix 10,000
    samples, with about 2 per window: about 20.
    """
    order = Order(samples=100_000, chunk_samples=10, window_chunks=1000)
    steps = np.diff(np.array(epoch_order(order, 0)))
    assert int((np.abs(steps) == 1).sum()) < 60


def test_seeds_and_epochs_give_independent_orders() -> None:
    """Any two agree in no more positions than expected by chance."""
    orders = [
        np.array(epoch_order(Order(samples=5000, seed=seed, window_chunks=5000), epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for index, first in enumerate(orders):
        for second in orders[:index]:
            assert int((first == second).sum()) < 12


def test_a_window_touches_few_chunks() -> None:
    """A window of w chunks touches at most w + 1, which bounds a reader's memory."""
    order = Order(samples=10_007, seed=3, chunk_samples=13, window_chunks=7)
    for number in range(10_007 // order.window_samples + 1):
        assert len(set(order.window(0, number) // 13)) <= 8


def test_the_order_never_changes_between_versions() -> None:
    """Saved stream states depend on it."""
    order = Order(samples=23, seed=7, chunk_samples=3, window_chunks=3)
    expected = "22 0 13 12 14 21 17 16 15 10 9 2 11 18 3 1 4 5 19 8 7 20 6"
    assert " ".join(map(str, epoch_order(order, 2))) == expected


def test_a_window_of_a_huge_dataset_needs_no_table() -> None:
    """10**15 samples, for which a table would not fit in memory."""
    order = Order(samples=10**15, chunk_samples=128)
    window = order.window(3, 10**15 // order.window_samples - 1)
    assert len(set(window.tolist())) == order.window_samples
    assert window.min() >= 0
    assert window.max() < 10**15
