"""TokenStream against a plain, slow reading of the same documents."""

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

from .truth import END, random_documents, true_samples, write_dataset

KEYS = ("tokens", "targets", "positions", "documents")
TYPES = {"tokens": "int64", "targets": "int64", "positions": "int64", "documents": "int32"}


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
    truth = true_samples(documents, length)
    assert len(truth) == samples
    got = [row for data in islice(stream, 2 * samples // batch) for row in rows_of(data)]
    assert got == [truth[sample] for sample in expected[: len(got)]]
    assert len(got) == 2 * samples // batch * batch


def ten_batches(stream: TokenStream) -> list[list[list[list[int]]]]:
    """The rows of the next ten batches."""
    return [rows_of(batch) for batch in islice(stream, 10)]


def small_stream(folder: Path, batch: int = 6, place: Reader | None = None) -> TokenStream:
    """A stream whose ten batches cross windows and epochs."""
    return TokenStream(
        folder,
        sequence_length=24,
        batch_size=batch,
        seed=5,
        place=place,
        chunk_samples=3,
        window_chunks=4,
    )


def test_batches_have_the_shapes_and_types_of_the_contract(dataset: Path) -> None:
    """Tokens, targets and positions are int64, documents int32, all (B, S) and writable."""
    batch = next(TokenStream(dataset, sequence_length=24, batch_size=6))
    assert {key: str(value.dtype) for key, value in batch.items()} == TYPES  # type: ignore[attr-defined]
    assert {value.shape for value in batch.values()} == {(6, 24)}  # type: ignore[attr-defined]
    assert all(value.flags.writeable for value in batch.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [2, 3, 6, 12])
def test_rows_of_all_ranks_make_the_batches_of_one(dataset: Path, count: int) -> None:
    """Whatever count divides the batch, ranks laid end to end equal a single reader."""
    alone = ten_batches(small_stream(dataset, 12))
    readers = [small_stream(dataset, 12, Reader(rank, count)) for rank in range(count)]
    parts = [ten_batches(reader) for reader in readers]
    assert [list(chain(*batches)) for batches in zip(*parts, strict=True)] == alone


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), min_size=10, max_size=10), mixed=st.booleans())
def test_unequal_shares_change_who_reads_which_rows_and_nothing_else(
    dataset: Path, cuts: list[int], mixed: bool
) -> None:
    """Shares that change before each batch: laid end to end the batches of one, and its states."""
    sources = {"one": dataset, "other": dataset} if mixed else dataset
    alone, *readers = (
        TokenStream(sources, sequence_length=24, batch_size=12, seed=5, place=place)
        for place in (None, Reader(0, 3), Reader(1, 3), Reader(2, 3))
    )
    for cut in cuts:
        shares = (cut + 1, 1, 10 - cut)
        for reader in readers:
            reader.share_out(shares)
        parts = [rows_of(next(reader)) for reader in readers]
        assert [len(part) for part in parts] == list(shares)
        assert [*chain(*parts)] == rows_of(next(alone))
        assert {json.dumps(reader.state_dict()) for reader in readers} == {
            json.dumps(alone.state_dict())
        }


@pytest.mark.parametrize("shares", [(6,), (3, 2), (6, 0), (7, -1), (2, 2, 2)])
def test_shares_that_do_not_make_up_the_batch_are_refused(
    dataset: Path, shares: tuple[int, ...]
) -> None:
    """One for each process, at least a row, and all rows; the shares before stay."""
    reader = small_stream(dataset, 6, Reader(1, 2))
    with pytest.raises(SettingError, match="do not divide batch_size 6 among 2 ranks"):
        reader.share_out(shares)
    assert len(next(reader)["tokens"]) == 3


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(0, 40),
    batches=st.tuples(st.sampled_from([2, 4, 6, 10]), st.sampled_from([2, 4, 6, 10])),
    counts=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
)
def test_resuming_anywhere_equals_going_on(
    dataset: Path, before: int, batches: tuple[int, int], counts: tuple[int, int]
) -> None:
    """A JSON state taken anywhere goes on, also with other batch sizes and rank counts."""
    first = small_stream(dataset, batches[0], Reader(0, counts[0]))
    for _ in range(before):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))

    whole = small_stream(dataset, 2)
    rows = [row for _ in range(before * batches[0] // 2) for row in rows_of(next(whole))]
    assert len(rows) == before * batches[0]
    expected = [row for _ in range(batches[1] * 2) for row in rows_of(next(whole))]

    readers = [
        small_stream(dataset, batches[1], Reader(rank, counts[1])) for rank in range(counts[1])
    ]
    got = []
    for reader in readers:
        reader.load_state_dict(state)
    for _ in range(3):
        for reader in readers:
            got += rows_of(next(reader))
    assert got == expected[: len(got)]


def test_a_state_is_small_and_the_same_on_every_rank(dataset: Path) -> None:
    """The state is a few JSON values that say where all ranks stand."""
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
def test_a_state_of_another_order_is_refused_by_name(dataset: Path, name: str, value: int) -> None:
    """What the order depends on must agree, and the error names what does not."""
    settings_of = {
        "sequence_length": 24,
        "batch_size": 6,
        "seed": 5,
        "chunk_samples": 3,
        "window_chunks": 4,
    }
    other = TokenStream(dataset, **(settings_of | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(StateError, match=name):
        other.load_state_dict(small_stream(dataset).state_dict())


def test_settings_may_be_numbers_of_numpy(dataset: Path) -> None:
    """The state is JSON all the same, and that of plain numbers."""
    states = []
    for number in (int, np.int64):
        stream = TokenStream(
            dataset,
            sequence_length=number(8),
            batch_size=number(2),
            seed=number(3),
            chunk_samples=number(2),
            window_chunks=number(3),
        )
        next(stream)
        states.append(json.dumps(stream.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("sources", wrong) for wrong in (3.5, b"shards", ["a", 3], object())),
        *(("place", wrong) for wrong in (0, "", {"rank": 0}, 2, object())),
        *(("cache_mib", wrong) for wrong in (None, 0.5, "64", [], float("nan"))),
        *(("sequence_length", wrong) for wrong in (None, 8.0, "8", True, b"8")),
        *(("batch_size", wrong) for wrong in (None, 2.0, [2], True, "2")),
        *(("window_chunks", wrong) for wrong in (None, 0, 1.5, "4", {})),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(
    dataset: Path, name: str, wrong: object
) -> None:
    """Never Python's own error, and never a default instead of what was given."""
    settings = {"sources": dataset, "sequence_length": 8, "batch_size": 2} | {name: wrong}
    with pytest.raises(SettingError, match=name) as refused:
        TokenStream(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_a_state_of_other_data_is_refused(dataset: Path, tmp_path: Path) -> None:
    """A dataset is known by its content: the same shape with other tokens is another one."""
    other = write_dataset(tmp_path / "other", random_documents(1, 40, 50))
    with pytest.raises(StateError, match="dataset"):
        small_stream(other).load_state_dict(small_stream(dataset).state_dict())


def test_damaged_states_are_refused(dataset: Path) -> None:
    """An unknown version, a missing count or a wrong type is an error, not a guess."""
    stream = small_stream(dataset)
    good = stream.state_dict()
    for change in ({"version": 1}, {"consumed_samples": -1}, {"consumed_samples": "6"}):
        with pytest.raises(StateError):
            stream.load_state_dict(good | change)
    with pytest.raises(StateError):
        stream.load_state_dict({})


def test_epochs_end_the_stream_after_the_last_whole_batch(dataset: Path) -> None:
    """Three epochs give every batch that they can fill, and no more."""
    stream = TokenStream(dataset, sequence_length=24, batch_size=7, epochs=3)
    count = sum(1 for _ in stream)
    assert count == 3 * stream.samples_per_epoch // 7
    assert stream.batches_per_epoch == stream.samples_per_epoch // 7
    assert list(stream) == []


def test_each_epoch_is_shuffled_anew_and_complete(dataset: Path) -> None:
    """Two epochs hold the same samples in another order."""
    probe = TokenStream(dataset, sequence_length=24, batch_size=1)
    rows = [rows_of(next(probe))[0][0] for _ in range(2 * probe.samples_per_epoch)]
    first, second = rows[: probe.samples_per_epoch], rows[probe.samples_per_epoch :]
    assert first != second
    assert sorted(first) == sorted(second)
    assert probe.epoch == 2


def test_a_batch_may_be_larger_than_many_epochs(tmp_path: Path) -> None:
    """A corpus of three samples still fills batches of eight."""
    documents = [np.array([1, 2, 3, END])] * 3
    stream = TokenStream(
        write_dataset(tmp_path / "few", documents), sequence_length=4, batch_size=8
    )
    batch = next(stream)
    assert batch["tokens"].tolist() == [[1, 2, 3, END]] * 8
    assert batch["targets"].tolist() == [[2, 3, END, -100]] * 8


def test_frames_are_decoded_once_in_a_window(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a whole unshuffled window costs one decode a frame."""
    decoded: list[tuple[str, int]] = []
    read = Shard.read

    def counting(shard: Shard, number: int) -> Frame:
        decoded.append((shard.path.name, number))
        return read(shard, number)

    monkeypatch.setattr(Shard, "read", counting)
    stream = TokenStream(
        dataset, sequence_length=8, batch_size=4, shuffle=False, chunk_samples=3, window_chunks=999
    )
    for _ in range(stream.batches_per_epoch):
        next(stream)
    assert len(decoded) == len(set(decoded))
    assert len(decoded) > 30


@pytest.mark.parametrize(
    ("change", "text"),
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
def test_settings_that_cannot_be_are_refused(
    dataset: Path, change: dict[str, object], text: str
) -> None:
    """The error names the setting and what to do."""
    given_settings: dict[str, object] = {"sequence_length": 24, "batch_size": 6}
    with pytest.raises(SettingError, match=text):
        TokenStream(dataset, **(given_settings | change))  # type: ignore[arg-type]
