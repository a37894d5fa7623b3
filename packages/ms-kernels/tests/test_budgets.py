"""Resource use of kernels compiled for other chips, and the lint of their TTIR."""

# ruff: noqa: N803  (Triton pointers are capital)
import importlib.util
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the extra cuda is not installed")

import triton.language as tl  # noqa: E402

from ms_kernels.aot.compiling import compile_entry  # noqa: E402
from ms_kernels.aot.gpu_library import entries  # noqa: E402
from ms_kernels.aot.lint import lint  # noqa: E402
from ms_kernels.aot.targets import target_named  # noqa: E402
from ms_kernels.core.entries import Entry  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "budgets.py"
SPEC = importlib.util.spec_from_file_location("budgets", SCRIPT)
budgets = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(budgets)

UPDATE = "python benchmarks/budgets.py --update --target"


def one_entry_per_kernel(target):
    """Return one bfloat16 entry of each kernel: the first in the catalog."""
    first_entries = {}
    for entry in entries(target):
        if entry.dtype == "bf16":
            first_entries.setdefault(entry.kernel, entry)
    return first_entries.values()


def differences(target, selected):
    """Compile entries and return those whose resources differ from the golden file."""
    golden, chip = budgets.golden(target), target_named(target)
    changed = {}
    for entry in selected:
        facts = compile_entry(entry, chip).resources
        current = [getattr(facts, name) for name in budgets.FIELDS]
        if current != golden["kernels"].get(entry.name):
            changed[entry.name] = (golden["kernels"].get(entry.name), current)
    return changed


def require_golden_compiler(target):
    """Skip if another version of Triton wrote the golden files."""
    version = budgets.golden(target)["triton"]
    if version != triton.__version__:
        pytest.skip(f"golden files are from Triton {version}, this is {triton.__version__}")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernel_resources_match_the_golden_files(target):
    """Registers, spills, shared memory, matrix instructions and vector width of each kernel."""
    require_golden_compiler(target)
    assert differences(target, one_entry_per_kernel(target)) == {}, f"{UPDATE} {target}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_every_entrys_resources_match_the_golden_files(target):
    """The same for every size."""
    require_golden_compiler(target)
    selected = [entry for entry in entries(target) if entry.dtype in budgets.golden_dtypes(target)]
    assert differences(target, selected) == {}, f"{UPDATE} {target}"


def test_only_the_backward_pass_of_attention_spills_on_sm_90_and_loads_are_vectors():
    """Checked in the golden file, so the installed version of Triton does not matter.

    Its three loops need slightly more registers than exist; on an H100 these tiles were the
    fastest tested.
    """
    kernels = budgets.golden("sm_90")["kernels"]
    assert len(kernels) > 240
    fields = {name: index for index, name in enumerate(budgets.FIELDS)}
    spilled = {name: facts[fields["spilled_bytes"]] for name, facts in kernels.items()}
    assert all(name.startswith("attention_backward") for name, size in spilled.items() if size)
    assert max(spilled.values()) <= 128
    # A sink's gradient reads two numbers per query and head, from rows of any length.
    wide = [facts for name, facts in kernels.items() if "backward_sinks" not in name]
    assert len(kernels) - len(wide) == 3
    assert {facts[fields["vector_bits"]] for facts in wide} == {128}


def test_products_use_the_matrix_units():
    """Without matrix instructions, attention and expert products would be 10 times slower.

    Float32 products have none: TF32 would round exact inputs to 10 bits. A sink's gradient is a
    sum, not a matrix product.
    """
    field = budgets.FIELDS.index("matrix_instructions")
    for target in ("sm_90", "gfx942"):
        for name, facts in budgets.golden(target)["kernels"].items():
            multiplies = name.startswith(("attention_", "grouped_", "decode_parts"))
            sums = "delta" in name or "backward_sinks" in name
            if multiplies and not sums and "_fp32" not in name:
                assert facts[field] > 0, name


@triton.jit
def overflowing(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    offsets = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit
def widened(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = (first + tl.program_id(0)).to(tl.int64)
    offsets = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit
def widened_too_late(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    offsets = (row * stride).to(tl.int64) + tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit
def overflowing_in_a_loop(first, X, Y, count, stride, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        offsets = start * stride + tl.arange(0, BLOCK)
        tl.store(Y + offsets, tl.load(X + offsets))


@triton.jit
def second_launch_axis(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = (first + tl.program_id(1)).to(tl.int64)
    offsets = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets, mask=offsets < count), mask=offsets < count)


def ttir_of(function):
    """Return a test kernel's TTIR."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"first": "i32", "X": "*fp32", "Y": "*fp32", "count": "i32", "stride": "i32"}
    source = ASTSource(
        fn=function, signature={**signature, "BLOCK": "constexpr"}, constexprs={"BLOCK": 128}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return str(compiled.asm["ttir"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (overflowing, "32 bits that may overflow"),
        (widened_too_late, "32 bits that may overflow"),
        (overflowing_in_a_loop, "32 bits that may overflow"),
        (second_launch_axis, "axis y of the launch"),
        (widened, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_lint_finds_each_fault(function, message):
    """A 32-bit product in an address, widened too late or in a loop; a second launch axis."""
    faults = lint(ttir_of(function))
    assert all(message in fault for fault in faults) if message else faults == []
    assert bool(faults) == bool(message)


@pytest.mark.parametrize("target", ["sm_90"])
def test_our_kernels_pass_the_lint(target):
    """One entry of each kernel; the build checks all others."""
    for entry in one_entry_per_kernel(target):
        assert lint(compile_entry(entry, target_named(target)).ttir, entry.argument_limits()) == []


def test_changed_launch_parameters_are_detected():
    """An entry with other parameters differs from its golden line, so the comparison can fail."""
    require_golden_compiler("sm_90")
    entry = next(
        candidate
        for candidate in entries("sm_90")
        if candidate.name == "rms_norm_forward_bf16_4096"
    )
    fields = {**{name: getattr(entry, name) for name in Entry.__annotations__}, "warps": 2}
    assert list(differences("sm_90", [Entry(**fields)])) == [entry.name]
