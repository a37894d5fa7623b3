"""The Triton backend where there is no GPU: its kernels interpreted, its choice, its launches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ms_kernels.core.choice import choose
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

pytest.importorskip("triton", reason="the extra cuda is not installed")

TESTS = Path(__file__).parent
OPERATORS = [each.operator for each in IMPLEMENTATIONS if each.backend == "triton"]


def interpret(*arguments, examples):
    """Run the interpreted tests in a process of their own, and return how it ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MS_EXAMPLES": str(examples)}
    return subprocess.run(
        [*command, str(TESTS / "interpreted_kernels.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


HALF = " or ".join(f"[{operator}]" for operator in OPERATORS[::2])


@pytest.mark.parametrize("chosen", [HALF, f"not ({HALF})"], ids=["half", "the rest"])
def test_the_kernels_equal_the_reference_in_the_interpreter(chosen):
    """Every operator, on a few calls drawn at random; torch is told the truth about each."""
    ended = interpret("-k", chosen, examples=4)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_equal_the_reference_on_many_calls(operator):
    """The same on a hundred calls."""
    ended = interpret("-k", f"[{operator}]", examples=100)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_gpu_gets_the_kernels_and_says_why(operator):
    """The choice is made from a description, on a machine that has no GPU."""
    contract = CONTRACTS[operator]
    call = contract.call({}, dtype=torch.float32, device="cuda")
    assert choose(call, IMPLEMENTATIONS).backend == "triton"
    wide = contract.call({}, dtype=torch.float64, device="cuda")
    assert choose(wide, IMPLEMENTATIONS).backend == "reference"
    assert choose(contract.call({}), IMPLEMENTATIONS).backend != "triton"


def test_plain_attention_on_cuda_goes_to_torchs_own_kernels_and_says_so():
    """In half precision without window, documents or cache; everything else is ours."""
    contract = CONTRACTS["attention"]

    def chosen(dims=(), without=("documents", "sinks"), dtype=torch.bfloat16, **options):
        call = contract.call(
            dict(dims), device="cuda", dtype=dtype, without=without, options=options
        )
        return choose(call, IMPLEMENTATIONS)

    plain = chosen()
    assert plain.backend == "sdpa"
    assert "cuDNN" in plain.implementation.merit
    assert chosen(causal=False).backend == "sdpa"
    for other in (
        chosen(window=8),
        chosen(without=("sinks",)),
        chosen(without=("documents",)),
        chosen({"Dv": 8}),
        chosen({"Sq": 1}),
        chosen({"D": 20}),
        chosen(dtype=torch.float32),
    ):
        assert other.backend == "triton"
        assert [each.backend for each in other.verdicts].index("sdpa") >= 0


def test_what_no_kernel_holds_goes_to_the_reference():
    """Rows and heads have a limit, and the verdict names it."""
    call = CONTRACTS["rms_norm"].call({"H": 65_537}, device="cuda")
    choice = choose(call, IMPLEMENTATIONS)
    assert choice.backend == "reference"
    (verdict,) = [each for each in choice.verdicts if each.backend == "triton"]
    assert "rows of up to 65536 features, not 65537" in verdict.reason
    call = CONTRACTS["attention"].call({"D": 257}, device="cuda")
    assert choose(call, IMPLEMENTATIONS).backend == "reference"


def test_without_triton_the_reference_is_taken_and_the_extra_is_named():
    """A machine whose Triton is missing says what to install; nothing fails."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import ms_kernels.operators, ms_kernels.core.dispatch as d\n"
        "call = ms_kernels.operators.CONTRACTS['swiglu'].call({}, device='cuda')\n"
        "choice = d.decide(call)\n"
        "print(choice.backend, [each.reason for each in choice.verdicts])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("reference")
    assert "ms-kernels[cuda]" in ended.stdout


def test_importing_the_package_imports_no_kernel():
    """Triton takes a second to import, so the first call that needs it does."""
    code = (
        "import sys, ms_kernels.operators\n"
        "print(any(each.endswith('.kernels') for each in sys.modules), 'triton' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\n"
