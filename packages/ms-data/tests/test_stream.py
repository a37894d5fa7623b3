"""TokenStream compared with a slow reference on the same documents."""

import json
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ms_data import Batch, SettingError, StateError, TokenStream
from ms_data.disk.shard import Frame, Shard
from ms_data.streams.order import Order

from .reference_samples import END, random_documents, true_samples, write_dataset

KEYS = ("tokens", "targets", "positions", "documents")
TYPES = {"tokens": "int64", "targets": "int64", "positions": "int64", "documents": "int32"}


@frozen
class Reader:
    """A rank and the number of ranks."""

    rank: int
    count: int


def rows_of(batch: Batch) -> list[list[list[int]]]:
    """Return each row of a batch as four lists."""
    columns = [batch[key].tolist() for key in KEYS]  # type: ignore[literal-required]
    return [list(row) for row in zip(*columns, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    count=st.integers(1, 40),
    max_tokens=st.integers(1, 120),
    length=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    window=st.integers(1, 9),
    batch=st.integers(1, 9),
    frame=st.integers(1, 40),
    vocabulary=st.sampled_from([500, 70_000]),
    shuffle=st.booleans(),
)
def test_two_epochs_equal_the_reference_samples_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    max_tokens: int,
    length: int,
    chunk: int | None,
    window: int,
    batch: int,
    frame: int,
    vocabulary: int,
    shuffle: bool,
) -> None:
    """Rows follow `Order` and are cut directly from the documents."""
    documents = random_documents(seed, count, max_tokens, vocabulary)
    assume(sum(map(len, documents)) >= length)
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
    samples_by_number = true_samples(documents, length)
    assert len(samples_by_number) == samples
    rows = [row for data in islice(stream, 2 * samples // batch) for row in rows_of(data)]
    assert rows == [samples_by_number[sample] for sample in expected[: len(rows)]]
    assert len(rows) == 2 * samples // batch * batch


def ten_batches(stream: TokenStream) -> list[list[list[list[int]]]]:
    """Return the rows of the next ten batches."""
    return [rows_of(batch) for batch in islice(stream, 10)]


def small_stream(folder: Path, batch: int = 6, place: Reader | None = None) -> TokenStream:
    """Return a stream whose first ten batches cross windows and epochs."""
    return TokenStream(
        folder,
        sequence_length=24,
        batch_size=batch,
        seed=5,
        place=place,
        chunk_samples=3,
        window_chunks=4,
    )


def test_batches_have_documented_shapes_and_dtypes(dataset: Path) -> None:
    """All arrays are (B, S) and writable; documents are int32, the others int64."""
    batch = next(TokenStream(dataset, sequence_length=24, batch_size=6))
    assert {key: str(value.dtype) for key, value in batch.items()} == TYPES  # type: ignore[attr-defined]
    assert {value.shape for value in batch.values()} == {(6, 24)}  # type: ignore[attr-defined]
    assert all(value.flags.writeable for value in batch.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [2, 3, 6, 12])
def test_the_rows_of_all_ranks_form_the_single_reader_batches(dataset: Path, count: int) -> None:
    expected = ten_batches(small_stream(dataset, 12))
    readers = [small_stream(dataset, 12, Reader(rank, count)) for rank in range(count)]
    parts = [ten_batches(reader) for reader in readers]
    assert [list(chain(*batches)) for batches in zip(*parts, strict=True)] == expected


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), min_size=10, max_size=10), mixed=st.booleans())
def test_unequal_shares_redistribute_rows_without_changing_batches_or_states(
    dataset: Path, cuts: list[int], mixed: bool
) -> None:
    """Shares change before every batch."""
    sources = {"first": dataset, "second": dataset} if mixed else dataset
    reference, *readers = (
        TokenStream(sources, sequence_length=24, batch_size=12, seed=5, place=place)
        for place in (None, Reader(0, 3), Reader(1, 3), Reader(2, 3))
    )
    for cut in cuts:
        shares = (cut + 1, 1, 10 - cut)
        for reader in readers:
            reader.share_out(shares)
        parts = [rows_of(next(reader)) for reader in readers]
        assert [len(part) for part in parts] == list(shares)
        assert [*chain(*parts)] == rows_of(next(reference))
        assert {json.dumps(reader.state_dict()) for reader in readers} == {
            json.dumps(reference.state_dict())
        }


@pytest.mark.parametrize("shares", [(6,), (3, 2), (6, 0), (7, -1), (2, 2, 2)])
def test_shares_must_be_positive_and_sum_to_the_batch(
    dataset: Path, shares: tuple[int, ...]
) -> None:
    """After a refusal the previous shares remain."""
    reader = small_stream(dataset, 6, Reader(1, 2))
    with pytest.raises(SettingError, match="do not divide batch_size 6 among 2 ranks"):
        reader.share_out(shares)
    assert len(next(reader)["tokens"]) == 3


@settings(max_examples=40, deadline=None)
@given(
    batches_before=st.integers(0, 40),
    batches=st.tuples(st.sampled_from([2, 4, 6, 10]), st.sampled_from([2, 4, 6, 10])),
    counts=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
)
def test_resuming_at_any_point_continues_exactly(
    dataset: Path, batches_before: int, batches: tuple[int, int], counts: tuple[int, int]
) -> None:
    """Also with other batch sizes and rank counts; the state goes through JSON."""
    first = small_stream(dataset, batches[0], Reader(0, counts[0]))
    for _ in range(batches_before):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))

    reference = small_stream(dataset, 2)
    skipped = [
        row for _ in range(batches_before * batches[0] // 2) for row in rows_of(next(reference))
    ]
    assert len(skipped) == batches_before * batches[0]
    expected = [row for _ in range(batches[1] * 2) for row in rows_of(next(reference))]

    readers = [
        small_stream(dataset, batches[1], Reader(rank, counts[1])) for rank in range(counts[1])
    ]
    rows = []
    for reader in readers:
        reader.load_state_dict(state)
    for _ in range(3):
        for reader in readers:
            rows += rows_of(next(reader))
    assert rows == expected[: len(rows)]


def test_a_state_is_small_and_the_same_on_every_rank(dataset: Path) -> None:
    readers = [small_stream(dataset, 6, Reader(rank, 3)) for rank in range(3)]
    for reader in readers:
        next(reader)
    states = [json.dumps(reader.state_dict()) for reader in readers]
    assert len(set(states)) == 1
    assert len(states[0]) < 400
    assert readers[0].consumed_samples == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 6), ("sequence_length", 25), ("shuffle", False), ("window_chunks", 5)],
)
def test_a_state_with_another_order_setting_is_refused_by_name(
    dataset: Path, name: str, value: int
) -> None:
    base_settings = {
        "sequence_length": 24,
        "batch_size": 6,
        "seed": 5,
        "chunk_samples": 3,
        "window_chunks": 4,
    }
    stream = TokenStream(dataset, **(base_settings | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(StateError, match=name):
        stream.load_state_dict(small_stream(dataset).state_dict())


def test_settings_accept_numpy_integers(dataset: Path) -> None:
    """The state is JSON, as with Python integers."""
    states = []
    for integer in (int, np.int64):
        stream = TokenStream(
            dataset,
            sequence_length=integer(8),
            batch_size=integer(2),
            seed=integer(3),
            chunk_samples=integer(2),
            window_chunks=integer(3),
        )
        next(stream)
        states.append(json.dumps(stream.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("name", "bad_value"),
    [
        *(("sources", bad_value) for bad_value in (3.5, b"shards", ["a", 3], object())),
        *(("place", bad_value) for bad_value in (0, "", {"rank": 0}, 2, object())),
        *(("cache_mib", bad_value) for bad_value in (None, 0.5, "64", [], float("nan"))),
        *(("sequence_length", bad_value) for bad_value in (None, 8.0, "8", True, b"8")),
        *(("batch_size", bad_value) for bad_value in (None, 2.0, [2], True, "2")),
        *(("window_chunks", bad_value) for bad_value in (None, 0, 1.5, "4", {})),
    ],
)
def test_settings_of_the_wrong_type_are_refused_by_name(
    dataset: Path, name: str, bad_value: object
) -> None:
    """Neither a builtin error nor a silent default."""
    settings = {"sources": dataset, "sequence_length": 8, "batch_size": 2} | {name: bad_value}
    with pytest.raises(SettingError, match=name) as error:
        TokenStream(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_state_of_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    """Datasets are identified by content, not by shape."""
    other = write_dataset(tmp_path / "other", random_documents(1, 40, 50))
    with pytest.raises(StateError, match="dataset"):
        small_stream(other).load_state_dict(small_stream(dataset).state_dict())


def test_damaged_states_are_refused(dataset: Path) -> None:
    """Unknown versions, missing counts and wrong types."""
    stream = small_stream(dataset)
    good = stream.state_dict()
    for change in ({"version": 1}, {"consumed_samples": -1}, {"consumed_samples": "6"}):
        with pytest.raises(StateError):
            stream.load_state_dict(good | change)
    with pytest.raises(StateError):
        stream.load_state_dict({})


def test_epochs_end_the_stream_after_the_last_full_batch(dataset: Path) -> None:
    stream = TokenStream(dataset, sequence_length=24, batch_size=7, epochs=3)
    count = sum(1 for _ in stream)
    assert count == 3 * stream.samples_per_epoch // 7
    assert stream.batches_per_epoch == stream.samples_per_epoch // 7
    assert list(stream) == []


def test_each_epoch_has_all_samples_in_a_new_order(dataset: Path) -> None:
    stream = TokenStream(dataset, sequence_length=24, batch_size=1)
    rows = [rows_of(next(stream))[0][0] for _ in range(2 * stream.samples_per_epoch)]
    first, second = rows[: stream.samples_per_epoch], rows[stream.samples_per_epoch :]
    assert first != second
    assert sorted(first) == sorted(second)
    assert stream.epoch == 2


def test_a_batch_may_span_several_epochs(tmp_path: Path) -> None:
    """Three samples fill batches of eight."""
    documents = [np.array([1, 2, 3, END])] * 3
    stream = TokenStream(
        write_dataset(tmp_path / "few", documents), sequence_length=4, batch_size=8
    )
    batch = next(stream)
    assert batch["tokens"].tolist() == [[1, 2, 3, END]] * 8
    assert batch["targets"].tolist() == [[2, 3, END, -100]] * 8


def test_frames_are_decoded_once_per_window(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[str, int]] = []
    original_read = Shard.read

    def counting_read(shard: Shard, number: int) -> Frame:
        decoded.append((shard.path.name, number))
        return original_read(shard, number)

    monkeypatch.setattr(Shard, "read", counting_read)
    stream = TokenStream(
        dataset, sequence_length=8, batch_size=4, shuffle=False, chunk_samples=3, window_chunks=999
    )
    for _ in range(stream.batches_per_epoch):
        next(stream)
    assert len(decoded) == len(set(decoded))
    assert len(decoded) > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 7, "place": Reader(0, 2)}, "multiple of 2"),
        ({"place": Reader(2, 2)}, "got 2 of 2"),
        ({"split": "held_out"}, "train"),
        ({"sequence_length": 10**6}, "lower sequence_length"),
        ({"batch_size": 10**6, "epochs": 1}, "lower batch_size"),
    ],
)
def test_invalid_settings_are_refused_with_a_remedy(
    dataset: Path, change: dict[str, object], message: str
) -> None:
    base_settings: dict[str, object] = {"sequence_length": 24, "batch_size": 6}
    with pytest.raises(SettingError, match=message):
        TokenStream(dataset, **(base_settings | change))  # type: ignore[arg-type]
