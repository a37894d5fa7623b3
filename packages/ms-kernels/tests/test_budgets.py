"""What kernels take of chips that are not here, and the lint that reads their TTIR."""

# ruff: noqa: N803  (kernels at fault, told by their names; pointers are capital in Triton)
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


def one_of_each(target):
    """Return one bfloat16 entry of each kernel: the first in the catalogue."""
    found = {}
    for entry in entries(target):
        if entry.dtype == "bf16":
            found.setdefault(entry.kernel, entry)
    return found.values()


def differences(target, chosen):
    """Compile entries and return those whose facts are not the golden ones."""
    golden, chip = budgets.golden(target), target_named(target)
    found = {}
    for entry in chosen:
        facts = compile_entry(entry, chip).resources
        now = [getattr(facts, name) for name in budgets.FIELDS]
        if now != golden["kernels"].get(entry.name):
            found[entry.name] = (golden["kernels"].get(entry.name), now)
    return found


def same_compiler(target):
    """Skip where the golden files were made by another version of Triton."""
    version = budgets.golden(target)["triton"]
    if version != triton.__version__:
        pytest.skip(f"the golden files are of Triton {version}, and this is {triton.__version__}")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_take_what_the_golden_files_say(target):
    """Registers, spills, shared memory, matrix instructions and vector width of each kernel."""
    same_compiler(target)
    assert differences(target, one_of_each(target)) == {}, f"{UPDATE} {target}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_every_entry_takes_what_the_golden_files_say(target):
    """The same of every size."""
    same_compiler(target)
    chosen = [entry for entry in entries(target) if entry.dtype in budgets.kept(target)]
    assert differences(target, chosen) == {}, f"{UPDATE} {target}"


def test_only_the_backward_pass_of_attention_spills_on_sm_90_and_loads_are_vectors():
    """Read from the golden file, whatever Triton it is of.

    Its three loops need a few more registers than there are; on an H100 these tiles were
    the fastest of those tried.
    """
    kernels = budgets.golden("sm_90")["kernels"]
    assert len(kernels) > 240
    fields = {name: place for place, name in enumerate(budgets.FIELDS)}
    spilled = {name: facts[fields["spilled_bytes"]] for name, facts in kernels.items()}
    assert all(name.startswith("attention_backward") for name, size in spilled.items() if size)
    assert max(spilled.values()) <= 128
    # A sink's gradient reads two numbers a query and head, from rows of any length.
    wide = [facts for name, facts in kernels.items() if "backward_sinks" not in name]
    assert len(kernels) - len(wide) == 3
    assert {facts[fields["vector_bits"]] for facts in wide} == {128}


def test_products_use_the_matrix_units():
    """Attention, expert and packed products without one would be a tenth as fast.

    Those in float32 have none: TF32 would round what is to be exact to 10 bits. The gradient of a
    sink is a sum, no product of matrices.
    """
    place = budgets.FIELDS.index("matrix_instructions")
    for target in ("sm_90", "gfx942"):
        for name, facts in budgets.golden(target)["kernels"].items():
            multiplies = name.startswith(("attention_", "grouped_", "quantized_", "decode_parts"))
            sums = "delta" in name or "backward_sinks" in name
            if multiplies and not sums and "_fp32" not in name:
                assert facts[place] > 0, name


@triton.jit
def overflowing(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    at = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < count), mask=at < count)


@triton.jit
def widened(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = (first + tl.program_id(0)).to(tl.int64)
    at = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < count), mask=at < count)


@triton.jit
def too_late(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    at = (row * stride).to(tl.int64) + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < count), mask=at < count)


@triton.jit
def in_a_loop(first, X, Y, count, stride, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        at = start * stride + tl.arange(0, BLOCK)
        tl.store(Y + at, tl.load(X + at))


@triton.jit
def two_axes(first, X, Y, count, stride, BLOCK: tl.constexpr):
    row = (first + tl.program_id(1)).to(tl.int64)
    at = row * stride + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < count), mask=at < count)


def ttir_of(function):
    """Return a test kernel's TTIR."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"first": "i32", "X": "*fp32", "Y": "*fp32", "count": "i32", "stride": "i32"}
    source = ASTSource(
        fn=function, signature={**signature, "BLOCK": "constexpr"}, constexprs={"BLOCK": 128}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return str(made.asm["ttir"])


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (overflowing, "32 bits that may overflow"),
        (too_late, "32 bits that may overflow"),
        (in_a_loop, "32 bits that may overflow"),
        (two_axes, "axis y of the launch"),
        (widened, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_lint_finds_what_it_is_for(function, told):
    """A product of 32 bits in an address, widened too late or in a loop; a second launch axis."""
    faults = lint(ttir_of(function))
    assert all(told in fault for fault in faults) if told else faults == []
    assert bool(faults) == bool(told)


@pytest.mark.parametrize("target", ["sm_90"])
def test_no_kernel_of_ours_has_such_a_fault(target):
    """One entry of each kernel; a build refuses any other that has one."""
    for entry in one_of_each(target):
        assert lint(compile_entry(entry, target_named(target)).ttir, entry.greatest()) == []


def test_a_change_of_sizes_shows():
    """A kernel with other sizes differs from its golden line, so the comparison can fail."""
    same_compiler("sm_90")
    entry = next(each for each in entries("sm_90") if each.name == "rms_norm_forward_bf16_4096")
    more = {**{name: getattr(entry, name) for name in Entry.__annotations__}, "warps": 2}
    assert list(differences("sm_90", [Entry(**more)])) == [entry.name]
