"""TokenStream against a plain, slow reading of the same documents."""

from itertools import islice

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import Batch, TokenStream
from ms_data.order import Order

from .truth import random_documents, true_sample, write_dataset

KEYS = ("tokens", "targets", "positions", "documents")


@frozen
class Reader:
    """A place among readers."""

    rank: int
    count: int


def rows_of(batch: Batch) -> list[list[list[int]]]:
    """Each row of a batch as four lists."""
    columns = [batch[key].tolist() for key in KEYS]  # type: ignore[literal-required]
    return [list(row) for row in zip(*columns, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    count=st.integers(1, 40),
    longest=st.integers(1, 120),
    length=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    window=st.integers(1, 9),
    batch=st.integers(1, 9),
    frame=st.integers(1, 40),
    vocabulary=st.sampled_from([500, 70_000]),
    shuffle=st.booleans(),
)
def test_two_epochs_equal_the_slow_truth(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    longest: int,
    length: int,
    chunk: int | None,
    window: int,
    batch: int,
    frame: int,
    vocabulary: int,
    shuffle: bool,
) -> None:
    """Each row is the sample that the order names, cut by hand from the documents."""
    documents = random_documents(seed, count, longest, vocabulary)
    if sum(map(len, documents)) < length:
        return
    folder = write_dataset(
        tmp_path_factory.mktemp("any") / "shards",
        documents,
        frame_tokens=frame,
        vocabulary_size=vocabulary,
    )
    stream = TokenStream(
        folder,
        sequence_length=length,
        batch_size=batch,
        seed=seed,
        shuffle=shuffle,
        chunk_samples=chunk,
        window_chunks=window,
    )
    samples = stream.samples_per_epoch
    order = Order(
        samples=samples,
        seed=seed,
        chunk_samples=chunk or -(-4 * frame // length),
        window_chunks=window,
        shuffle=shuffle,
    )
    expected = [
        sample
        for epoch in range(2)
        for number in range(-(-samples // order.window_samples))
        for sample in order.window(epoch, number).tolist()
    ]
    truth = [true_sample(documents, sample, length) for sample in range(samples)]
    got = [row for data in islice(stream, 2 * samples // batch) for row in rows_of(data)]
    assert got == [truth[sample] for sample in expected[: len(got)]]
    assert len(got) == 2 * samples // batch * batch
