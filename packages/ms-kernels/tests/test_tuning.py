"""Tuning tables: what they say, what they refuse, and that a choice is a pure function of them."""

import json

import msgspec
import pytest
import torch

from ms_kernels import TableError
from ms_kernels.contracts.call import describe
from ms_kernels.core import chips, dispatch, launches, tables
from ms_kernels.core.choice import Implementation, choose, with_launches
from ms_kernels.core.launches import ANY_SIZE, TableKey, TunedKernel
from ms_kernels.core.tables import Configuration, Table, TableEntry, read_table, write_table
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.tuning import tuner

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
    """Give a function that makes a table of one entry count, of the chip ``toy`` or another."""
    monkeypatch.setattr(tables, "_folder", lambda: tmp_path)
    tables._entries.cache_clear()

    def forget():
        tables._entries.cache_clear()
        launches.launch_of.cache_clear()

    def install(chip="toy", **entry):
        table = {**TABLE, "chip": chip, "entries": [{**ENTRY, **entry}]}
        (tmp_path / f"{chip}.json").write_text(json.dumps(table))
        forget()

    yield install
    forget()


def test_a_table_is_written_and_read_back_the_same(tmp_path):
    """One entry a line, in order, so that a change reviews well."""
    entries = tuple(
        TableEntry(operator="rms_norm", backend="cpu", version=1, dtype=dtype, pays_from=pays_from)
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
        ({"chip": "other"}, "is the table of other; rename it to other.json"),
        ({"chip": "../toy"}, "not a valid chip name"),
        ({"entries": [ENTRY, ENTRY]}, "two entries for rms_norm cpu float32"),
        ({"entries": [{**ENTRY, "version": 0}]}, "version must be 1 or more"),
        ({"entries": [{**ENTRY, "pays_from": -1}]}, "pays_from 0 or more"),
        ({"entries": [{**ENTRY, "pays_from": 1.5}]}, "Expected `int | null`"),
        ({"entries": [{**ENTRY, "dtype": "nn"}]}, "'nn' is not a torch dtype"),
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
    with pytest.raises(TableError, match="not a tuning table"):
        read_table(path)
    path.write_bytes(b" " * (tables.LIMIT_BYTES + 1))
    with pytest.raises(TableError, match="larger than the limit of 4 MiB"):
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
    assert reason(small) == "is faster from 1000 elements on toy, and this call has 992"
    assert choose(asked(124, "toy"), IMPLEMENTATIONS).backend == "cpu"
    toy(pays_from=None)
    never = choose(asked(10**6, "toy"), IMPLEMENTATIONS)
    assert reason(never) == "was not faster at any size measured on toy"


@pytest.mark.parametrize("stale", [{"version": 2}, {"dtype": "bfloat16"}, {"backend": "triton"}])
def test_what_a_table_does_not_know_follows_the_implementation(toy, stale):
    """Another version, dtype, backend, or a chip without a table: the built-in threshold."""
    toy(pays_from=0, **stale)
    for chip in ("toy", "unknown", ""):
        choice = choose(asked(1000, chip), IMPLEMENTATIONS)
        assert choice.backend == "reference"
        assert reason(choice) == "is faster from 65536 elements, and this call has 8008"


def test_a_configuration_is_the_first_whose_sizes_hold(toy):
    """Then the kernel's own; a tuner's trial goes before all, and a kernel without is told."""
    steps = [
        {"kernel": "walk", "at_most": {"H": 64}, "values": {"block": 1}},
        {"kernel": "walk", "at_most": {"H": 512, "rows": 10}, "values": {"block": 2}},
    ]
    toy(configurations=steps)
    about = {"operator": "rms_norm", "name": "walk", "backend": "cpu", "sizes": ("H", "rows")}
    walk = TunedKernel(**about, defaults=((100, {"block": 8}), (ANY_SIZE, {"block": 9})))

    def found(kernel=walk, chip="toy", **sizes):
        return kernel.values(TableKey(chip, torch.float32), sizes["H"], sizes["rows"])

    assert found(H=64, rows=99) == {"block": 1}
    assert found(H=65, rows=10) == {"block": 2}
    assert found(H=65, rows=11) == {"block": 8}
    assert found(H=101, rows=11) == {"block": 9}
    assert found(H=64, rows=99, chip="other") == {"block": 8}
    with launches.trying(walk, {"block": 7}):
        assert found(H=1, rows=1) == {"block": 7}
    for other in ({"operator": "swiglu"}, {"name": "run"}):
        with launches.trying(TunedKernel(**{**about, **other}), {"block": 7}):
            assert found(H=1, rows=1) == {"block": 1}
    with pytest.raises(TableError, match="no tuning table has run of rms_norm cpu, version 1"):
        found(TunedKernel(**{**about, "name": "run"}), H=1, rows=1)
    with pytest.raises(TableError, match="version 2"):
        found(TunedKernel(**about, version=2), H=1, rows=1)


def test_float32_may_have_defaults_of_its_own():
    """Kernels hold half as many elements of twice the size."""
    half, single = ((ANY_SIZE, {"block": 2}),), ((ANY_SIZE, {"block": 1}),)
    kernel = TunedKernel(operator="swiglu", name="walk", defaults=half, wide_defaults=single)
    chosen = {dtype: kernel.values(TableKey("", dtype))["block"] for dtype in DTYPES}
    assert chosen == {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}


def test_explain_names_what_a_kernel_runs_with_and_whether_it_was_measured(toy):
    """The parameters, whose table they stand in, and that nobody timed them."""
    contract = CONTRACTS["rms_norm"]

    def launched(chip):
        call = contract.call({"H": 4096}, device="cuda", chip=chip)
        choice = with_launches(choose(call, IMPLEMENTATIONS), call, contract.bind(call))
        return [str(each) for each in choice.launches]

    forward = {"kernel": "rms_norm_forward", "at_most": {}, "values": {"ELEMENTS": 7}}
    toy(backend="triton", configurations=[forward])
    assert launched("toy") == [
        "rms_norm_forward ELEMENTS=7 (toy, measured)",
        "rms_norm_backward ELEMENTS=2048 PROGRAMS=256 num_warps=8 (any, never measured)",
    ]


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


def test_a_tuner_takes_the_fastest_configuration_by_measuring(toy, monkeypatch):
    """One of three configurations works often and one does not run: the third is chosen."""
    again = TunedKernel(
        operator="swiglu",
        name="again",
        backend="toy",
        sizes=("I",),
        tried_at=({"I": 64, "...": 64}, {"I": 256, "...": 64}),
        candidates=({"times": 40}, {"times": -1}, {"times": 1}),
        defaults=((ANY_SIZE, {"times": 40}),),
    )

    def run(gate, up):
        values = again.values(TableKey("toy", gate.dtype), gate.shape[1])
        if values["times"] < 0:
            raise RuntimeError("out of shared memory")
        for _ in range(values["times"]):
            result = torch.nn.functional.silu(gate) * up
        return result

    toy_ = Implementation(operator="swiglu", backend="toy", run=run, merit="", tuned=(again,))
    reference = next(
        each for each in IMPLEMENTATIONS if (each.operator, each.backend) == ("swiglu", "reference")
    )
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (toy_, reference))
    table = tuner.tune(torch.device("cpu"), dtypes=(torch.float32,), spend_s=0.01)
    (entry,) = table.entries
    # Both sizes chose the same, so the larger stands for both.
    (found,) = entry.configurations
    assert (found.kernel, found.at_most, found.values) == ("again", {"I": 256}, {"times": 1})
    assert entry.measured


def test_every_kernel_has_a_configuration_on_a_chip_that_nobody_measured():
    """In three dtypes, at any size, with the parameters that its candidates have."""
    for each in IMPLEMENTATIONS:
        for dtype in each.dtypes if each.tuned else ():
            for kernel in each.tuned:
                sizes = tuple(2**30 for _ in kernel.sizes)
                launch = launches.launch_of(kernel, "nowhere", describe(dtype), sizes)
                assert (launch.chip, launch.measured) == ("any", False)
                assert (kernel.operator, kernel.backend) == (each.operator, each.backend)
                assert kernel.version == each.version
                for candidate in kernel.candidates:
                    assert candidate.keys() == launch.values.keys(), kernel.name


def test_no_gpus_table_claims_to_be_measured():
    """Nothing has run on a GPU, and each entry says so."""
    for chip in ("gfx942", "sm_80", "sm_89", "sm_90", "sm_100"):
        table = read_table(tables._folder() / f"{chip}.json")
        assert table.torch == ""
        assert not any(entry.measured for entry in table.entries)


def test_every_committed_table_is_whole_and_of_what_exists():
    """Each reads strictly, and each entry is for an implementation in its present version."""
    versions = {(each.operator, each.backend): each.version for each in IMPLEMENTATIONS}
    assert "cpu-avx512" in tables.chips()
    for chip in tables.chips():
        table = read_table(tables._folder() / f"{chip}.json")
        for entry in table.entries:
            assert versions[entry.operator, entry.backend] == entry.version


def test_the_chip_of_a_device_is_a_name_that_a_file_may_have():
    """For the CPU by its vector unit; for a device that is not here by its type."""
    assert chips.chip_of(torch.device("cpu")).startswith("cpu-")
    assert chips.chip_of(torch.device("meta")) == "meta"
    call = dispatch.describe_call(CONTRACTS["swiglu"], (torch.ones(2, 3),) * 2, ())
    assert call.chip == chips.chip_of(torch.device("cpu"))


def test_structs_are_frozen():
    """A decision cannot be changed by whoever holds a table."""
    with pytest.raises(AttributeError):
        Configuration(at_most={}, values={"block": 1}).values = {}
    assert msgspec.structs.asdict(TableEntry(operator="a", backend="b", version=1, dtype="int8"))
