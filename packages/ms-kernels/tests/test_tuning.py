"""Tuning tables: what they say, what they refuse, and that a choice is a pure function of them."""

import json

import msgspec
import pytest
import torch

from ms_kernels import TableError, dispatch, tuner, tuning
from ms_kernels.dispatch import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.registry import Implementation, choose
from ms_kernels.tuning import Configuration, Entry, Table, read_table, write_table

ENTRY = {
    "operator": "rms_norm",
    "backend": "cpu",
    "version": 1,
    "dtype": "float32",
    "pays_from": 1000,
    "configurations": [{"at_most": {"H": 64}, "values": {"block": 1}}],
}
TABLE = {"format": "ms-kernels-tuning-1", "chip": "toy", "torch": "2.13.0", "entries": [ENTRY]}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Give a function that makes a table of the chip ``toy`` count."""
    monkeypatch.setattr(tuning, "_folder", lambda: tmp_path)
    tuning._entries.cache_clear()

    def install(**entry):
        entries = [{**ENTRY, **entry}]
        (tmp_path / "toy.json").write_text(json.dumps({**TABLE, "entries": entries}))
        tuning._entries.cache_clear()

    yield install
    tuning._entries.cache_clear()


def test_a_table_is_written_and_read_back_the_same(tmp_path):
    """One entry a line, in order, so that a change reviews well."""
    entries = tuple(
        Entry(operator="rms_norm", backend="cpu", version=1, dtype=dtype, pays_from=pays_from)
        for dtype, pays_from in (("float32", 5), ("bfloat16", None))
    )
    table = Table(chip="toy", torch="2.13.0", entries=entries)
    write_table(table, tmp_path / "toy.json")
    assert [each.name for each in tmp_path.iterdir()] == ["toy.json"]
    assert len((tmp_path / "toy.json").read_text().splitlines()) == 3
    assert read_table(tmp_path / "toy.json").entries == entries[::-1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "ms-kernels-tuning-2"}, "Invalid value 'ms-kernels-tuning-2'"),
        ({"chips": 1}, "unknown field `chips`"),
        ({"chip": "other"}, "is a table of other; name it other.json"),
        ({"chip": "../toy"}, "no name of a chip"),
        ({"entries": [ENTRY, ENTRY]}, "two entries for rms_norm cpu float32"),
        ({"entries": [{**ENTRY, "version": 0}]}, "version must be 1 or more"),
        ({"entries": [{**ENTRY, "pays_from": -1}]}, "pays_from 0 or more"),
        ({"entries": [{**ENTRY, "pays_from": 1.5}]}, "Expected `int | null`"),
        ({"entries": [{**ENTRY, "dtype": "nn"}]}, "there is no dtype 'nn'"),
        (
            {"entries": [{**ENTRY, "configurations": [{"at_most": {}, "values": {}}]}]},
            "a configuration needs values",
        ),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(tmp_path, change, told):
    """The file, what is wrong with it, and the remedy."""
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({**TABLE, **change}))
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_absent_or_huge_table_is_refused(tmp_path):
    """Nothing is read that is larger than a table may be."""
    path = tmp_path / "toy.json"
    with pytest.raises(TableError, match="No such file"):
        read_table(path)
    path.write_text(json.dumps(TABLE)[:-9])
    with pytest.raises(TableError, match="no tuning table"):
        read_table(path)
    path.write_bytes(b" " * (tuning.LIMIT_BYTES + 1))
    with pytest.raises(TableError, match="above"):
        read_table(path)


def asked(rows, chip):
    """Describe rms_norm of rows of 8 on the CPU: 8 · rows + 8 elements."""
    return CONTRACTS["rms_norm"].call({"...": rows, "H": 8}, chip=chip)


def reason(choice):
    """Return why the CPU's own implementation was taken or not."""
    return next(each.reason for each in choice.verdicts if each.backend == "cpu")


def test_a_threshold_decides_by_all_elements_and_is_told(toy):
    """Below it the next backend is taken; the reason names the threshold and the table."""
    toy(pays_from=1000)
    small = choose(asked(123, "toy"), IMPLEMENTATIONS)
    assert small.backend == "reference"
    assert reason(small) == "pays from 1000 elements on (toy), and here are 992"
    assert choose(asked(124, "toy"), IMPLEMENTATIONS).backend == "cpu"
    toy(pays_from=None)
    never = choose(asked(10**6, "toy"), IMPLEMENTATIONS)
    assert reason(never) == "pays from no size that was tried on toy"


@pytest.mark.parametrize("stale", [{"version": 2}, {"dtype": "bfloat16"}, {"backend": "triton"}])
def test_what_a_table_does_not_know_follows_the_implementation(toy, stale):
    """Another version, dtype, backend, or a chip without a table: the built-in threshold."""
    toy(pays_from=0, **stale)
    for chip in ("toy", "unknown", ""):
        choice = choose(asked(1000, chip), IMPLEMENTATIONS)
        assert choice.backend == "reference"
        assert reason(choice) == "pays from 65536 elements on, and here are 8008"


def test_a_configuration_is_the_first_whose_sizes_hold(toy, monkeypatch):
    """Then the default; a tuner's trial goes before all."""
    monkeypatch.setattr(tuning, "chip_of", lambda device: "toy")
    steps = [
        {"at_most": {"H": 64}, "values": {"block": 1}},
        {"at_most": {"H": 512, "rows": 10}, "values": {"block": 2}},
    ]
    toy(configurations=steps)

    def found(**sizes):
        return tuning.configuration(
            "rms_norm",
            "cpu",
            version=1,
            device=torch.device("cpu"),
            dtype=torch.float32,
            sizes=sizes,
            default={"block": 9},
        )

    assert found(H=64, rows=99) == {"block": 1}
    assert found(H=65, rows=10) == {"block": 2}
    assert found(H=65, rows=11) == {"block": 9}
    with tuning.trying("rms_norm", "cpu", {"block": 7}):
        assert found(H=1, rows=1) == {"block": 7}
    with tuning.trying("swiglu", "cpu", {"block": 7}):
        assert found(H=1, rows=1) == {"block": 1}


@pytest.mark.parametrize(
    ("ratios", "pays_from"),
    [
        ([(1, 2.0), (10, 1.5), (100, 0.9), (1000, 0.5)], 100),
        ([(1, 0.9), (10, 0.8)], 0),
        ([(1, 0.9), (10, 1.2), (100, 0.8)], 100),
        ([(1, 0.9), (10, 1.2)], None),
        ([(10, 0.5), (10, 1.5), (100, 1.0)], 100),
    ],
)
def test_a_backend_pays_from_where_it_is_slower_no_more(ratios, pays_from):
    """From there on at every size that was tried; the least of all stands for those below."""
    assert tuner._pays_from(ratios) == pays_from


def test_a_tuner_takes_the_fastest_configuration_by_measuring(monkeypatch):
    """Of two configurations, one of which does the work twice, the other is chosen."""

    def run(gate, up):
        values = tuning.configuration(
            "swiglu",
            "toy",
            version=1,
            device=gate.device,
            dtype=gate.dtype,
            sizes={"...": gate.shape[0]},
            default={"times": 40},
        )
        for _ in range(values["times"]):
            result = torch.nn.functional.silu(gate) * up
        return result

    toy_ = Implementation(
        operator="swiglu",
        backend="toy",
        run=run,
        merit="",
        candidates=({"times": 40}, {"times": 1}),
    )
    reference = next(
        each for each in IMPLEMENTATIONS if (each.operator, each.backend) == ("swiglu", "reference")
    )
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (toy_, reference))
    monkeypatch.setattr(tuner, "STEPS", (4, 64))
    table = tuner.tune(torch.device("cpu"), dtypes=(torch.float32,), spend_s=0.01)
    (entry,) = table.entries
    assert [each.values for each in entry.configurations] == [{"times": 1}]
    assert entry.configurations[0].at_most == {"...": 64, "I": 1408}


def test_every_committed_table_is_whole_and_of_what_exists():
    """Each reads strictly, and each entry is for an implementation in its present version."""
    versions = {(each.operator, each.backend): each.version for each in IMPLEMENTATIONS}
    assert "cpu-avx512" in tuning.chips()
    for chip in tuning.chips():
        table = read_table(tuning._folder() / f"{chip}.json")
        for entry in table.entries:
            assert versions[entry.operator, entry.backend] == entry.version


def test_the_chip_of_a_device_is_a_name_that_a_file_may_have():
    """For the CPU by its vector unit; for a device that is not here by its type."""
    assert tuning.chip_of(torch.device("cpu")).startswith("cpu-")
    assert tuning.chip_of(torch.device("meta")) == "meta"
    call = dispatch.describe_call(CONTRACTS["swiglu"], (torch.ones(2, 3),) * 2, ())
    assert call.chip == tuning.chip_of(torch.device("cpu"))


def test_structs_are_frozen():
    """A decision cannot be changed by whoever holds a table."""
    with pytest.raises(AttributeError):
        Configuration(at_most={}, values={"block": 1}).values = {}
    assert msgspec.structs.asdict(Entry(operator="a", backend="b", version=1, dtype="int8"))
