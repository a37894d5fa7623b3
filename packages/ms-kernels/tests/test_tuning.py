"""Tuning tables: contents, validation, and choices that depend on nothing else."""

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
def install_toy_table(monkeypatch, tmp_path):
    """Return a function that installs a one-entry table for the chip ``toy`` or another."""
    monkeypatch.setattr(tables, "_folder", lambda: tmp_path)
    tables._entries.cache_clear()

    def clear_caches():
        tables._entries.cache_clear()
        launches.launch_of.cache_clear()

    def install(chip="toy", **entry):
        table = {**TABLE, "chip": chip, "entries": [{**ENTRY, **entry}]}
        (tmp_path / f"{chip}.json").write_text(json.dumps(table))
        clear_caches()

    yield install
    clear_caches()


def test_a_table_round_trips(tmp_path):
    """One entry per line, sorted, so that diffs are easy to review."""
    entries = tuple(
        TableEntry(operator="rms_norm", backend="cpu", version=1, dtype=dtype, pays_from=pays_from)
        for dtype, pays_from in (("float32", 5), ("bfloat16", None))
    )
    table = Table(chip="toy", torch="2.13.0", entries=entries)
    write_table(table, tmp_path / "toy.json")
    assert [file.name for file in tmp_path.iterdir()] == ["toy.json"]
    assert len((tmp_path / "toy.json").read_text().splitlines()) == 3
    assert read_table(tmp_path / "toy.json").entries == entries[::-1]


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_a_damaged_table_is_refused_in_one_line(tmp_path, change, message):
    """The error names the file, the problem and the fix."""
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({**TABLE, **change}))
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_missing_or_oversized_table_is_refused(tmp_path):
    """Files above the size limit are not read."""
    path = tmp_path / "toy.json"
    with pytest.raises(TableError, match="No such file"):
        read_table(path)
    path.write_text(json.dumps(TABLE)[:-9])
    with pytest.raises(TableError, match="not a tuning table"):
        read_table(path)
    path.write_bytes(b" " * (tables.LIMIT_BYTES + 1))
    with pytest.raises(TableError, match="larger than the limit of 4 MiB"):
        read_table(path)


def rms_norm_call(rows, chip):
    """Describe rms_norm on the CPU with rows of 8: 8 * rows + 8 elements."""
    return CONTRACTS["rms_norm"].call({"...": rows, "H": 8}, chip=chip)


def cpu_reason(choice):
    """Return why the CPU implementation was chosen or not."""
    return next(verdict.reason for verdict in choice.verdicts if verdict.backend == "cpu")


def test_a_threshold_counts_all_elements_and_appears_in_the_reason(install_toy_table):
    """Below it the next backend is chosen; the reason names the threshold and the table."""
    install_toy_table(pays_from=1000)
    small = choose(rms_norm_call(123, "toy"), IMPLEMENTATIONS)
    assert small.backend == "reference"
    assert cpu_reason(small) == "is faster from 1000 elements on toy, and this call has 992"
    assert choose(rms_norm_call(124, "toy"), IMPLEMENTATIONS).backend == "cpu"
    install_toy_table(pays_from=None)
    never = choose(rms_norm_call(10**6, "toy"), IMPLEMENTATIONS)
    assert cpu_reason(never) == "was not faster at any size measured on toy"


@pytest.mark.parametrize("stale", [{"version": 2}, {"dtype": "bfloat16"}, {"backend": "triton"}])
def test_calls_without_a_table_entry_use_the_implementations_threshold(install_toy_table, stale):
    """For another version, dtype or backend, or a chip without a table."""
    install_toy_table(pays_from=0, **stale)
    for chip in ("toy", "unknown", ""):
        choice = choose(rms_norm_call(1000, chip), IMPLEMENTATIONS)
        assert choice.backend == "reference"
        assert cpu_reason(choice) == "is faster from 65536 elements, and this call has 8008"


def test_the_first_configuration_that_fits_the_sizes_is_used(install_toy_table):
    """Without a matching entry the kernel's defaults apply; a tuner's trial overrides both."""
    configurations = [
        {"kernel": "walk", "at_most": {"H": 64}, "values": {"block": 1}},
        {"kernel": "walk", "at_most": {"H": 512, "rows": 10}, "values": {"block": 2}},
    ]
    install_toy_table(configurations=configurations)
    fields = {"operator": "rms_norm", "name": "walk", "backend": "cpu", "sizes": ("H", "rows")}
    tuned = TunedKernel(**fields, defaults=((100, {"block": 8}), (ANY_SIZE, {"block": 9})))

    def values_of(kernel=tuned, chip="toy", **sizes):
        """Without a table the kernel's defaults apply; a tuner's trial overrides both."""
        return kernel.values(TableKey(chip, torch.float32), sizes["H"], sizes["rows"])

    assert values_of(H=64, rows=99) == {"block": 1}
    assert values_of(H=65, rows=10) == {"block": 2}
    assert values_of(H=65, rows=11) == {"block": 8}
    assert values_of(H=101, rows=11) == {"block": 9}
    assert values_of(H=64, rows=99, chip="other") == {"block": 8}
    with launches.trying(tuned, {"block": 7}):
        assert values_of(H=1, rows=1) == {"block": 7}
    for change in ({"operator": "swiglu"}, {"name": "run"}):
        with launches.trying(TunedKernel(**{**fields, **change}), {"block": 7}):
            assert values_of(H=1, rows=1) == {"block": 1}
    with pytest.raises(TableError, match="no tuning table has run of rms_norm cpu, version 1"):
        values_of(TunedKernel(**{**fields, "name": "run"}), H=1, rows=1)
    with pytest.raises(TableError, match="version 2"):
        values_of(TunedKernel(**fields, version=2), H=1, rows=1)


def test_float32_can_have_its_own_defaults():
    """A kernel's tile holds half the number of elements at twice the size."""
    half_defaults, wide_defaults = ((ANY_SIZE, {"block": 2}),), ((ANY_SIZE, {"block": 1}),)
    kernel = TunedKernel(
        operator="swiglu", name="walk", defaults=half_defaults, wide_defaults=wide_defaults
    )
    blocks = {dtype: kernel.values(TableKey("", dtype))["block"] for dtype in DTYPES}
    assert blocks == {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}


def test_explain_names_launch_parameters_and_whether_they_were_measured(install_toy_table):
    """The launch parameters, the chip whose table they come from, and whether they were timed."""
    contract = CONTRACTS["rms_norm"]

    def launches_on(chip):
        call = contract.call({"H": 4096}, device="cuda", chip=chip)
        choice = with_launches(choose(call, IMPLEMENTATIONS), call, contract.bind(call))
        return [str(launch) for launch in choice.launches]

    forward = {"kernel": "rms_norm_forward", "at_most": {}, "values": {"ELEMENTS": 7}}
    install_toy_table(backend="triton", configurations=[forward])
    assert launches_on("toy") == [
        "rms_norm_forward ELEMENTS=7 (toy, measured)",
        "rms_norm_backward ELEMENTS=2048 PROGRAMS=256 STAGES=1 num_warps=8 (any, never measured)",
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
def test_a_backend_pays_from_the_size_above_which_it_is_never_slower(ratios, pays_from):
    """The smallest measured size also covers all sizes below it."""
    assert tuner._pays_from(ratios) == pays_from


def test_the_tuner_picks_the_fastest_measured_configuration(install_toy_table, monkeypatch):
    """One of three configurations is slow and one fails to run, so the third is chosen."""
    repeat_kernel = TunedKernel(
        operator="swiglu",
        name="repeat",
        backend="toy",
        sizes=("I",),
        tried_at=({"I": 64, "...": 64}, {"I": 256, "...": 64}),
        candidates=({"times": 40}, {"times": -1}, {"times": 1}),
        defaults=((ANY_SIZE, {"times": 40}),),
    )

    def run(gate, up):
        values = repeat_kernel.values(TableKey("toy", gate.dtype), gate.shape[1])
        if values["times"] < 0:
            raise RuntimeError("out of shared memory")
        for _ in range(values["times"]):
            result = torch.nn.functional.silu(gate) * up
        return result

    toy_backend = Implementation(
        operator="swiglu", backend="toy", run=run, merit="", tuned=(repeat_kernel,)
    )
    reference = next(
        impl for impl in IMPLEMENTATIONS if (impl.operator, impl.backend) == ("swiglu", "reference")
    )
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (toy_backend, reference))
    table = tuner.tune(torch.device("cpu"), dtypes=(torch.float32,), spend_s=0.01)
    (entry,) = table.entries
    # Both sizes chose the same configuration, so one entry at the larger size covers both.
    (config,) = entry.configurations
    assert (config.kernel, config.at_most, config.values) == ("repeat", {"I": 256}, {"times": 1})
    assert entry.measured


def test_every_kernel_has_a_configuration_on_an_unmeasured_chip():
    """In three dtypes, at any size, with the parameters of its candidates."""
    for impl in IMPLEMENTATIONS:
        for dtype in impl.dtypes if impl.tuned else ():
            for kernel in impl.tuned:
                sizes = tuple(2**30 for _ in kernel.sizes)
                launch = launches.launch_of(kernel, "nowhere", describe(dtype), sizes)
                assert (launch.chip, launch.measured) == ("any", False)
                assert (kernel.operator, kernel.backend) == (impl.operator, impl.backend)
                assert kernel.version == impl.version
                for candidate in kernel.candidates:
                    assert candidate.keys() == launch.values.keys(), kernel.name


def test_gpu_tables_do_not_claim_to_be_measured():
    """None was measured on a GPU, and every entry says so."""
    for chip in ("gfx942", "sm_80", "sm_89", "sm_90", "sm_100"):
        table = read_table(tables._folder() / f"{chip}.json")
        assert table.torch == ""
        assert not any(entry.measured for entry in table.entries)


def test_every_committed_table_is_valid_and_current():
    """Each table parses strictly, and each entry matches an implementation's current version."""
    versions = {(impl.operator, impl.backend): impl.version for impl in IMPLEMENTATIONS}
    assert "cpu-avx512" in tables.chips()
    for chip in tables.chips():
        table = read_table(tables._folder() / f"{chip}.json")
        for entry in table.entries:
            assert versions[entry.operator, entry.backend] == entry.version


def test_the_chip_name_is_a_valid_file_name():
    """CPUs are named by vector extension, absent devices by type."""
    assert chips.chip_of(torch.device("cpu")).startswith("cpu-")
    assert chips.chip_of(torch.device("meta")) == "meta"
    call = dispatch.describe_call(CONTRACTS["swiglu"], (torch.ones(2, 3),) * 2, ())
    assert call.chip == chips.chip_of(torch.device("cpu"))


def test_structs_are_frozen():
    """A table's holder cannot change a decision."""
    with pytest.raises(AttributeError):
        Configuration(at_most={}, values={"block": 1}).values = {}
    assert msgspec.structs.asdict(TableEntry(operator="a", backend="b", version=1, dtype="int8"))
