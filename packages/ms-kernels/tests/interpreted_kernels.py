"""The Triton kernels against the reference in float64, in Triton's interpreter.

Not collected by itself: `test_triton.py` runs it in a process whose TRITON_INTERPRET is 1.
"""

import os

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ms_kernels import triton, tuner, tuning
from ms_kernels.check import compare
from ms_kernels.dispatch import CONTRACTS, describe_call

from .interpreter import correct_bfloat16
from .test_operators import arguments_of

correct_bfloat16()

EXAMPLES = int(os.environ.get("MS_EXAMPLES", "6"))
OPERATORS = {each.operator: each for each in triton.IMPLEMENTATIONS}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("operator", OPERATORS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 10,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_kernels_equal_the_reference(operator, data):
    """Odd sizes, no rows, any strides, three dtypes, every option: within the tolerance."""
    contract, each = CONTRACTS[operator], OPERATORS[operator]
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = arguments_of(data, contract, dtype)
    call = describe_call(contract, tuple(tensors), options)
    contract.bind(call)
    if each.refuses(call):
        return
    for part, share in compare(contract, each.run, tensors, options):
        assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def test_the_interpreter_rounds_to_the_nearest_bfloat16():
    """A swiglu of bfloat16 is off by half a unit in the last place at most, so nothing is cut."""
    contract = CONTRACTS["swiglu"]
    gate, up = contract.draw({}, dtype=torch.bfloat16).values()
    truth = contract.reference(gate.double(), up.double())
    got = OPERATORS["swiglu"].run(gate, up)
    torch.testing.assert_close(got.double(), truth, rtol=2**-8 + 1e-6, atol=1e-30)


def test_adamw_forgets_old_moments_entirely_where_it_is_told_to():
    """With betas of 0 a slope of 1e-4 beside moments of 1 makes a step of its sign."""
    contract, count = CONTRACTS["adamw_step"], 29
    generator = torch.Generator().manual_seed(0)
    slope = 1e-4 * torch.randn(count, generator=generator)
    tensors = [torch.randn(count, generator=generator), slope, torch.ones(count), torch.ones(count)]
    options = (1, 0.1, (0.0, 0.0), 1e-8, 0.01)
    for part, share in compare(contract, OPERATORS["adamw_step"].run, tensors, options):
        assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def test_a_tuner_runs_a_kernel_with_each_candidate(monkeypatch):
    """Every kernel of the operator gets an entry, of values that it was run with."""
    ran = []
    first = tuning.configuration

    def noted(operator, backend, kernel, **more):
        values = first(operator, backend, kernel, **more)
        ran.append((kernel, tuple(values.items())))
        return values

    monkeypatch.setattr(tuning, "configuration", noted)
    small = [
        evolve(each, tried_at=({"...": 4, "I": 16},), candidates=each.candidates[:2])
        for each in OPERATORS["swiglu"].tuned
    ]
    here = evolve(OPERATORS["swiglu"], devices=None, tuned=tuple(small))
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (here,))
    (entry,) = tuner.tune(torch.device("cpu"), dtypes=[torch.float32], spend_s=0.01).entries
    assert [each.kernel for each in entry.configurations] == ["gated_forward", "gated_backward"]
    for each in entry.configurations:
        assert each.at_most == {"I": 16}
        assert (each.kernel, tuple(each.values.items())) in ran
    for each in small:
        assert all((each.kernel, tuple(values.items())) in ran for values in each.candidates)


SMALL = {"...": 3, "H": 8, "V": 12, "I": 8, "B": 1, "S": 3, "Sq": 5, "Sk": 5, "T": 4, "K": 32}
SMALL |= {"P": 16, "G": 1, "N": 6, "E": 4}


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_is_told_the_truth_about_each_operator(operator):
    """Fake results have the real shapes, dtypes and strides, and nothing is written unannounced."""
    contract = CONTRACTS[operator]
    dims = {} if operator in ("decode_attention", "unpermute_tokens") else dict(SMALL)
    if operator == "permute_tokens":
        dims = {"T": 4, "H": 8}
    drawn = contract.draw({name: size for name, size in dims.items() if name in contract.example})
    tensors = [
        each.requires_grad_(argument.differentiable and not contract.mutates)
        for argument, each in zip(contract.arguments, drawn.values(), strict=True)
    ]
    name = f"{operator}_triton"
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        getattr(torch.ops.ms_kernels, name).default,
        (*tensors, *contract.defaults),
        test_utils=utilities,
    )
