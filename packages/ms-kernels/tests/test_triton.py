"""The Triton backend without a GPU: interpreted kernels, selection and launches."""

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
OPERATORS = [impl.operator for impl in IMPLEMENTATIONS if impl.backend == "triton"]


def run_interpreted(*arguments, examples):
    """Run the interpreted tests in a subprocess and return the completed process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MS_EXAMPLES": str(examples)}
    return subprocess.run(
        [*command, str(TESTS / "interpreted_kernels.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


HALF = " or ".join(f"[{operator}]" for operator in OPERATORS[::2])


@pytest.mark.parametrize("selection", [HALF, f"not ({HALF})"], ids=["half", "the rest"])
def test_kernels_equal_the_reference_in_the_interpreter(selection):
    """Every operator on a few random calls, plus opcheck."""
    process = run_interpreted("-k", selection, examples=2)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_the_reference_on_many_calls(operator):
    """The same with a hundred calls per operator."""
    process = run_interpreted("-k", f"[{operator}]", examples=100)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_gpu_gets_the_triton_kernels(operator):
    """The choice uses a description of the call, so it needs no GPU."""
    contract = CONTRACTS[operator]
    call = contract.call({}, dtype=torch.float32, device="cuda")
    assert choose(call, IMPLEMENTATIONS).backend == "triton"
    wide = contract.call({}, dtype=torch.float64, device="cuda")
    assert choose(wide, IMPLEMENTATIONS).backend == "reference"
    assert choose(contract.call({}), IMPLEMENTATIONS).backend != "triton"


def test_plain_attention_on_cuda_uses_torch_sdpa():
    """In half precision without window, documents or cache; all other calls use our kernel."""
    contract = CONTRACTS["attention"]

    def choice_for(dims=(), without=("documents", "sinks"), dtype=torch.bfloat16, **options):
        call = contract.call(
            dict(dims), device="cuda", dtype=dtype, without=without, options=options
        )
        return choose(call, IMPLEMENTATIONS)

    plain = choice_for()
    assert plain.backend == "sdpa"
    assert "cuDNN" in plain.implementation.merit
    assert choice_for(causal=False).backend == "sdpa"
    for choice in (
        choice_for(window=8),
        choice_for(without=("sinks",)),
        choice_for(without=("documents",)),
        choice_for({"Dv": 8}),
        choice_for({"Sq": 1}),
        choice_for({"D": 20}),
        choice_for(dtype=torch.float32),
    ):
        assert choice.backend == "triton"
        assert [verdict.backend for verdict in choice.verdicts].index("sdpa") >= 0


def test_sizes_above_the_kernel_limits_use_the_reference():
    """Rows and heads have a maximum width, and the verdict names it."""
    call = CONTRACTS["rms_norm"].call({"H": 65_537}, device="cuda")
    choice = choose(call, IMPLEMENTATIONS)
    assert choice.backend == "reference"
    (verdict,) = [v for v in choice.verdicts if v.backend == "triton"]
    assert "rows of up to 65536 features, not 65537" in verdict.reason
    call = CONTRACTS["attention"].call({"D": 257}, device="cuda")
    assert choose(call, IMPLEMENTATIONS).backend == "reference"


def test_without_triton_the_reference_is_used_and_the_extra_is_named():
    """Without Triton the explanation says what to install, and calls still work."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import ms_kernels.operators, ms_kernels.core.dispatch as d\n"
        "call = ms_kernels.operators.CONTRACTS['swiglu'].call({}, device='cuda')\n"
        "choice = d.decide(call)\n"
        "print(choice.backend, [each.reason for each in choice.verdicts])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.startswith("reference")
    assert "ms-kernels[cuda]" in process.stdout


def test_importing_the_package_does_not_import_kernels():
    """Importing Triton takes a second, so the first call that needs it does it."""
    code = (
        "import sys, ms_kernels.operators\n"
        "print(any(each.endswith('.kernels') for each in sys.modules), 'triton' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "False False\n"
