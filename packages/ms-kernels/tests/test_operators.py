"""Every implementation against float64 truth, with random sizes, strides, dtypes and options."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ms_kernels.checking import check, compare
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.core.launches import TableKey
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.operators.attention import triton as attention_triton

from .truth import TRUTHS

SIZES = {
    "rms_norm": {"...": (0, 9), "H": (1, 70)},
    "rotary": {"B": (0, 3), "S": (0, 9), "Hq": (1, 5), "Hk": (1, 3), "D": (2, 19)},
    "swiglu": {"...": (0, 9), "I": (1, 70)},
    "attention": {"B": (0, 3), "Sk": (1, 40), "Hk": (1, 3), "D": (1, 33), "Dv": (1, 33)},
    "cross_entropy": {"...": (0, 20), "V": (1, 90)},
    "linear_cross_entropy": {"...": (0, 20), "H": (1, 33), "V": (1, 90)},
    "add_rms_norm": {"...": (0, 9), "H": (1, 70)},
    "layer_norm": {"...": (0, 9), "H": (1, 70)},
    "geglu": {"...": (0, 9), "I": (1, 70)},
    "decode_attention": {
        "B": (0, 3),
        "Hk": (1, 3),
        "D": (1, 33),
        "P": (1, 6),
        "page": (1, 17),
        "N": (1, 4),
    },
    "token_log_probs": {"...": (0, 20), "H": (1, 33), "V": (1, 90)},
    "permute_tokens": {"T": (0, 20), "C": (1, 3), "H": (1, 33)},
    "unpermute_tokens": {"T": (0, 20), "C": (1, 3), "H": (1, 33)},
    "grouped_matmul": {"T": (0, 20), "E": (1, 5), "K": (1, 33), "N": (1, 33)},
    "causal_conv1d": {"B": (0, 3), "S": (1, 20), "C": (1, 70), "K": (1, 5)},
    "gated_delta_rule": {"B": (0, 2), "S": (1, 20), "Hk": (1, 2), "D": (1, 17), "Dv": (1, 20)},
}
SHAPES = {
    "permute_tokens": (128, 32),
    "unpermute_tokens": (64, 32),
    "grouped_matmul": (96, 48),
    "gated_delta_rule": (2, 48, 4, 8),
}
"""Shape of the example's first result, where it differs from the first argument's."""
STRIDES = ["contiguous", "every other feature", "dims reversed", "wider rows"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU_IMPLEMENTATIONS = [
    impl for impl in IMPLEMENTATIONS if impl.devices is None or "cpu" in impl.devices
]
IMPLEMENTATION_IDS = [f"{impl.operator}-{impl.backend}" for impl in CPU_IMPLEMENTATIONS]


@st.composite
def dims_of(draw, operator, limits=None):
    """Draw sizes, odd and zero among them."""
    limits = {**SIZES[operator], **(limits or {})}
    dims = {name: draw(st.integers(*bounds)) for name, bounds in limits.items()}
    if operator == "rotary":
        dims["C"] = draw(st.sampled_from([1, dims["B"]]))
        dims["R/2"] = draw(st.integers(1, dims["D"] // 2))
    if operator == "attention":
        dims["Hq"] = dims["Hk"] * draw(st.integers(1, 3))
        dims["Sq"] = draw(st.one_of(st.just(dims["Sk"]), st.integers(0, dims["Sk"])))
    if operator == "decode_attention":
        dims["Hq"] = dims["Hk"] * draw(st.integers(1, 3))
    if operator == "gated_delta_rule":
        dims["Hv"] = dims["Hk"] * draw(st.integers(1, 2))
    if operator == "unpermute_tokens":
        dims["R"] = dims["T"] * dims["C"]
    return dims


@st.composite
def options_of(draw, contract):
    """Draw each option at its default or at another value."""
    return tuple(
        draw(st.sampled_from([option.default, *option.trials])) for option in contract.options
    )


def restride(tensor, layout):
    """Return the same numbers in another memory layout."""
    if layout == "every other feature":
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "dims reversed":
        order = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "wider rows":
        wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 3))
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    return tensor


def draw_arguments(data, contract, dtype, limits=None):
    """Draw the tensors and options of one call, with sizes within `limits`."""
    dims = data.draw(dims_of(contract.name, limits))
    options = data.draw(options_of(contract), label="options")
    example = contract.draw(
        dims,
        dtype=dtype,
        seed=data.draw(st.integers(0, 2**31), label="seed"),
    )
    tensors = [
        None
        if argument.optional and data.draw(st.booleans(), label=f"no {argument.name}")
        else restride(example[argument.name], data.draw(st.sampled_from(STRIDES)))
        for argument in contract.arguments
    ]
    return tensors, options


@pytest.mark.parametrize("examples", [40, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS, ids=IMPLEMENTATION_IDS)
def test_every_backend_equals_the_reference_in_float64(implementation, examples):
    """Results and gradients are within the contract's tolerance, which the contract derives.

    Implementations are tested at all sizes, also where dispatch would not choose them.
    """
    contract = CONTRACTS[implementation.operator]
    compared = 0

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
    )
    @given(data=st.data())
    def compare_one_call(data):
        nonlocal compared
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        tensors, options = draw_arguments(data, contract, dtype)
        call = describe_call(contract, tuple(tensors), options)
        contract.bind(call)
        assume(obstacle_to(implementation, call) is None)
        for part, ratio in compare(contract, implementation.run, tensors, options):
            assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"
        compared += 1

    compare_one_call()
    assert compared >= examples // 2


@pytest.mark.parametrize(
    ("keys", "values", "fused"), [(1, 15, False), (7, 21, False), (8, 8, True)]
)
def test_the_fused_cpu_kernel_is_not_used_for_wide_values_in_half_precision(keys, values, fused):
    """Its rounding error grows with sqrt(Dv / D); the fallback is within the tolerance."""
    contract = CONTRACTS["attention"]
    (cpu,) = (i for i in IMPLEMENTATIONS if (i.operator, i.backend) == ("attention", "cpu"))
    sizes = {"B": 1, "Sk": 34, "Sq": 22, "Hq": 6, "Hk": 2, "D": keys, "Dv": values}
    for seed in range(20):
        example = contract.draw(sizes, dtype=torch.bfloat16, seed=seed)
        tensors = [*(example[name] for name in "qkv"), None, None]
        options = (True, None, None)
        call = describe_call(contract, tuple(tensors), options)
        assert (obstacle_to(cpu, call) is None) == fused
        run = cpu.run if fused else contract.reference
        assert all(ratio <= 1 for _, ratio in compare(contract, run, tensors, options))


@pytest.mark.parametrize("name", CONTRACTS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_reference_equals_the_formula_in_loops(name, data):
    """In float64 the reference equals the formula spelled out in scalar loops."""
    contract = CONTRACTS[name]
    tensors, options = draw_arguments(data, contract, torch.float64)
    copies = [tensor if tensor is None else tensor.clone() for tensor in tensors]
    actual, expected = contract.reference(*tensors, *options), TRUTHS[name](*copies, *options)
    # Both are float64 sums of up to 90 terms of order 1 to 100 and differ only in order.
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS, ids=IMPLEMENTATION_IDS)
def test_leading_dims_are_rows(implementation):
    """A tensor with more leading dims gives the results of its flattened rows, reshaped."""
    contract = CONTRACTS[implementation.operator]
    if "..." not in contract.example:
        pytest.skip("its dims are fixed")
    options = tuple(
        "none" if option.name == "reduction" else option.default for option in contract.options
    )
    flat = list(contract.draw({"...": 12}).values())
    deep = [
        tensor.unflatten(0, (2, 3, 2)) if "..." in argument.dims else tensor
        for argument, tensor in zip(contract.arguments, flat, strict=True)
    ]
    flat_results, deep_results = (
        implementation.run(*tensors, *options) for tensors in (flat, deep)
    )
    if not isinstance(flat_results, tuple):
        flat_results, deep_results = (flat_results,), (deep_results,)
    for flat_result, deep_result in zip(flat_results, deep_results, strict=True):
        assert torch.equal(deep_result, flat_result.unflatten(0, (2, 3, 2)))


def test_result_dtypes_and_shapes_follow_the_contract():
    """Results have the inputs' dtype; losses are float32, or float64 for float64 inputs."""
    for implementation in CPU_IMPLEMENTATIONS:
        contract = CONTRACTS[implementation.operator]
        for dtype in DTYPES:
            tensors = list(contract.draw({}, dtype=dtype).values())
            options = tuple(option.default for option in contract.options)
            if obstacle_to(implementation, describe_call(contract, tuple(tensors), options)):
                continue
            result = implementation.run(*tensors, *options)
            first = result[0] if isinstance(result, tuple) else result
            if "entropy" in contract.name or contract.name == "token_log_probs":
                assert first.dtype == (dtype if dtype == torch.float64 else torch.float32)
                assert first.shape == (tensors[2].shape if "token" in contract.name else ())
            else:
                shape = SHAPES.get(contract.name, tensors[0].shape)
                assert (first.dtype, first.shape) == (dtype, shape)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS, ids=IMPLEMENTATION_IDS)
def test_inputs_are_not_modified(implementation):
    """Neither forward nor backward writes to its inputs."""
    contract = CONTRACTS[implementation.operator]
    tensors = contract.draw({})
    originals = {name: tensor.clone() for name, tensor in tensors.items()}
    list(compare(contract, implementation.run, tensors.values(), contract.defaults))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, originals[name])


def test_a_finding_names_the_sizes_of_its_trial():
    """Trials with the same options differ in their sizes, and the finding says so."""
    descriptions = {finding.options for finding in check(["attention"], ["reference"])}
    assert {"", "D=24, Dv=8", "window=7, D=8, Dv=24"} <= descriptions


def test_attention_tiles_are_at_least_32_wide():
    """Some ptxas versions miscompile 16-column products for sm_90 (see `MIN_WIDTH`)."""
    key = TableKey("sm_90", torch.bfloat16)
    for width, values in ((24, 8), (8, 24), (16, 16), (1, 1)):
        for kernel in attention_triton.TUNED:
            constants = attention_triton._constants(kernel, key, width, values)
            assert min(constants["BD"], constants["BV"]) >= 32
