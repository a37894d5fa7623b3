"""Bad arguments are refused with one line: operator, argument, value and accepted values."""

import math

import pytest
import torch

import ms_kernels
from ms_kernels import ArgumentError, BackendError, KernelError
from ms_kernels.operators import CONTRACTS


def ones(*shape, **settings):
    """Shorthand for the table below."""
    return torch.ones(*shape, **settings)


def call_with(operator, **overrides):
    """Call `operator` on its example with some arguments replaced."""
    contract = CONTRACTS[operator]
    args = {**contract.draw({}), **{option.name: option.default for option in contract.options}}
    return getattr(ms_kernels, operator)(**{**args, **overrides})


WRONG = [
    # operator, arguments, argument at fault, words of its value, words of the accepted values
    ("rms_norm", {"x": [1.0]}, "x", "list", "torch.Tensor"),
    ("rms_norm", {"x": None}, "x", "None", "a tensor"),
    ("rms_norm", {"x": ones(4, 128, dtype=torch.int64)}, "x", "int64", "bfloat16"),
    ("rms_norm", {"x": ones(())}, "x", "()", "(..., H)"),
    ("rms_norm", {"x": ones(4, 0), "weight": ones(0)}, "x", "(4, 0)", "H at least 1"),
    ("rms_norm", {"x": ones(4, 128).to_sparse()}, "x", "sparse", "dense"),
    ("rms_norm", {"weight": ones(64)}, "weight", "(64,)", "(128,)"),
    ("rms_norm", {"weight": ones(1, 128)}, "weight", "(1, 128)", "(128,)"),
    ("rms_norm", {"weight": ones(128, device="meta")}, "weight", "meta", "cpu, as x is"),
    ("rms_norm", {"eps": -1.0}, "eps", "-1.0", "0 or more"),
    ("rms_norm", {"eps": "tiny"}, "eps", "'tiny'", "0 or more"),
    ("rotary", {"k": ones(2, 64, 2, 16)}, "k", "(2, 64, 2, 16)", "(2, 64, Hk, 32)"),
    ("rotary", {"cos": ones(1, 64, 16).bfloat16()}, "cos", "bfloat16", "float32"),
    ("rotary", {"cos": ones(3, 64, 16), "sin": ones(3, 64, 16)}, "cos", "(3, 64, 16)", "1 or 2"),
    ("rotary", {"cos": ones(1, 64, 17), "sin": ones(1, 64, 17)}, "cos", "17", "at most 16"),
    ("rotary", {"sin": ones(1, 63, 16)}, "sin", "(1, 63, 16)", "(1, 64, 16)"),
    ("rotary", {"interleaved": 1}, "interleaved", "1", "True or False"),
    ("swiglu", {"up": ones(256, 128).double()}, "up", "float64", "float32, as gate is"),
    ("swiglu", {"up": ones(255, 128)}, "up", "(255, 128)", "(256, 128)"),
    ("attention", {"k": ones(2, 48, 3, 16), "v": ones(2, 48, 3, 16)}, "k", "3", "divides q's 4"),
    ("attention", {"q": ones(2, 49, 4, 16)}, "q", "(2, 49, 4, 16)", "at most 48"),
    ("attention", {"v": ones(2, 48, 3, 8)}, "v", "(2, 48, 3, 8)", "(2, 48, 2, Dv)"),
    ("attention", {"sinks": ones(3)}, "sinks", "(3,)", "(4,)"),
    ("attention", {"q": ones(48, 4, 16)}, "q", "(48, 4, 16)", "(B, Sq, Hq, D)"),
    ("attention", {"documents": ones(2, 48)}, "documents", "float32", "int32 or int64"),
    ("attention", {"documents": ones(2, 47).int()}, "documents", "(2, 47)", "(2, 48)"),
    ("attention", {"window": 0}, "window", "0", "at least 1"),
    ("attention", {"window": 2.5}, "window", "2.5", "integer"),
    ("attention", {"causal": None}, "causal", "None", "True or False"),
    ("attention", {"scale": "half"}, "scale", "'half'", "a number"),
    ("cross_entropy", {"targets": ones(128)}, "targets", "float32", "int64 or int32"),
    ("cross_entropy", {"targets": ones(127).long()}, "targets", "(127,)", "(128,)"),
    ("cross_entropy", {"targets": ones(128).long() * 256}, "targets", "256", "from 0 to 255"),
    ("cross_entropy", {"targets": ones(128).long() * -1}, "targets", "-1", "from 0 to 255"),
    ("cross_entropy", {"label_smoothing": 1.0}, "label_smoothing", "1.0", "below 1"),
    ("cross_entropy", {"z_loss": -0.1}, "z_loss", "-0.1", "0 or more"),
    ("cross_entropy", {"reduction": "avg"}, "reduction", "'avg'", "'mean'"),
    ("cross_entropy", {"ignore_index": None}, "ignore_index", "None", "integer"),
    ("linear_cross_entropy", {"weight": ones(256, 32)}, "weight", "(256, 32)", "(V, 64)"),
    ("linear_cross_entropy", {"weight": ones(256, 64).half()}, "weight", "float16", "float32"),
    ("linear_cross_entropy", {"weight": ones(0, 64)}, "weight", "(0, 64)", "V at least 1"),
    ("linear_cross_entropy", {"targets": ones(512).long() * 300}, "targets", "300", "0 to 255"),
    ("add_rms_norm", {"residual": ones(256, 64)}, "residual", "(256, 64)", "(256, 128)"),
    ("add_rms_norm", {"residual": ones(256, 128).half()}, "residual", "float16", "float32, as x"),
    ("layer_norm", {"bias": ones(128).half()}, "bias", "float16", "float32, as weight is"),
    ("layer_norm", {"eps": -1}, "eps", "-1", "0 or more"),
    ("geglu", {"approximate": "erf"}, "approximate", "'erf'", "'none' or 'tanh'"),
    ("decode_attention", {"q": ones(3, 3, 16)}, "key_pages", "(9, 16, 2, 16)", "divides q's 3"),
    ("decode_attention", {"page_table": ones(3, 4).long()}, "page_table", "int64", "int32"),
    ("decode_attention", {"lengths": ones(3).int() * 65}, "lengths", "65", "from 0 to 64"),
    ("decode_attention", {"lengths": ones(3).int() * -1}, "lengths", "-1", "from 0 to 64"),
    ("decode_attention", {"page_table": ones(3, 4).int() * 9}, "page_table", "9", "from 0 to 8"),
    ("decode_attention", {"window": 0}, "window", "0", "at least 1"),
    ("token_log_probs", {"temperature": 0.0}, "temperature", "0.0", "above 0"),
    ("token_log_probs", {"tokens": ones(512).long() * 256}, "tokens", "256", "from 0 to 255"),
    ("token_log_probs", {"entropy": 1}, "entropy", "1", "True or False"),
    ("permute_tokens", {"count": 0}, "count", "0", "at least 1"),
    ("permute_tokens", {"experts": ones(64, 2).long() * 4}, "experts", "4", "from 0 to 3"),
    ("permute_tokens", {"experts": -ones(64, 2).long()}, "experts", "-1", "from 0 to 3"),
    ("permute_tokens", {"experts": ones(63, 2).long()}, "experts", "(63, 2)", "(64, C)"),
    ("unpermute_tokens", {"rows": ones(127, 32)}, "rows", "(127, 32)", "first size of 128"),
    ("unpermute_tokens", {"places": ones(64, 2).long() * 128}, "places", "128", "from 0 to 127"),
    ("unpermute_tokens", {"weights": ones(64, 1)}, "weights", "(64, 1)", "(64, 2)"),
    ("grouped_matmul", {"weights": ones(4, 16, 48)}, "weights", "(4, 16, 48)", "(E, 32, N)"),
    ("grouped_matmul", {"counts": ones(4).long()}, "counts", "4 in total", "96 in total"),
    ("grouped_matmul", {"counts": torch.tensor([-1, 0, 0, 97])}, "counts", "-1", "from 0 to 96"),
    ("grouped_matmul", {"counts": ones(4)}, "counts", "float32", "int64 or int32"),
    ("causal_conv1d", {"x": ones(2, 48)}, "x", "(2, 48)", "(B, S, C)"),
    ("causal_conv1d", {"weight": ones(64, 1, 4)}, "weight", "(64, 1, 4)", "(64, K)"),
    ("causal_conv1d", {"state": ones(2, 3, 64)}, "state", "(2, 3, 64)", "(2, 4, 64)"),
    ("causal_conv1d", {"bias": ones(64).half()}, "bias", "float16", "float32, as x is"),
    ("causal_conv1d", {"documents": ones(2, 47).int()}, "documents", "(2, 47)", "(2, 48)"),
    ("causal_conv1d", {"silu": "silu"}, "silu", "'silu'", "True or False"),
    (
        "gated_delta_rule",
        {"q": ones(2, 48, 3, 16), "k": ones(2, 48, 3, 16)},
        *("v", "(2, 48, 4, 8)", "q's 3 divides"),
    ),
    ("gated_delta_rule", {"k": ones(2, 48, 4, 16)}, "k", "(2, 48, 4, 16)", "(2, 48, 2, 16)"),
    ("gated_delta_rule", {"beta": ones(2, 48, 2)}, "beta", "(2, 48, 2)", "(2, 48, 4)"),
    ("gated_delta_rule", {"state": ones(2, 4, 16, 8).half()}, "state", "float16", "float32"),
    ("gated_delta_rule", {"state": ones(2, 4, 8, 16)}, "state", "(2, 4, 8, 16)", "(2, 4, 16, 8)"),
    ("gated_delta_rule", {"scale": "half"}, "scale", "'half'", "a number"),
]


@pytest.mark.parametrize(
    ("operator", "overrides", "argument", "got", "fits"),
    WRONG,
    ids=[f"{case[0]}-{case[2]}-{index}" for index, case in enumerate(WRONG)],
)
def test_bad_input_gives_one_line(operator, overrides, argument, got, fits):
    """The error names the operator, the argument, its value and the accepted values."""
    with pytest.raises(ArgumentError) as caught:
        call_with(operator, **overrides)
    error = caught.value
    assert (error.operator, error.argument) == (operator, argument)
    assert got in error.got
    assert fits in error.fits
    assert str(error) == f"{operator}: {argument} is {error.got}; it must be {error.fits}"
    assert "\n" not in str(error)


def test_errors_subclass_the_matching_builtins():
    """Callers may catch ValueError or RuntimeError without knowing this package."""
    assert issubclass(ArgumentError, KernelError | ValueError)
    assert issubclass(BackendError, RuntimeError)


def test_a_bad_call_after_a_good_one_is_still_refused():
    """A cached decision is never used for a call that differs in any property."""
    x, weight = torch.randn(4, 8), torch.ones(8)
    for _ in range(3):
        ms_kernels.rms_norm(x, weight)
        for bad in (weight[:4], weight.int(), weight.to("meta"), weight[None]):
            with pytest.raises(ArgumentError, match="weight"):
                ms_kernels.rms_norm(x, bad)
        with pytest.raises(ArgumentError, match="eps"):
            ms_kernels.rms_norm(x, weight, -1.0)


@pytest.mark.parametrize("operator", CONTRACTS)
def test_empty_batches_are_valid(operator):
    """Tensors without rows give results without rows and zero gradients."""
    contract = CONTRACTS[operator]
    empty_dims = {name: 0 for name in ("...", "B", "T", "R") if name in contract.example}
    if "..." in empty_dims or "B" in empty_dims:
        empty_dims.pop("T", None)
    example = contract.draw(empty_dims)
    for argument in contract.arguments:
        example[argument.name].requires_grad_(argument.differentiable)
    options = {option.name: option.default for option in contract.options}
    if "reduction" in options:
        options["reduction"] = "sum"
    result = getattr(ms_kernels, operator)(**example, **options)
    total = sum(part.sum() for part in (result if isinstance(result, tuple) else (result,)))
    assert total == 0
    if not total.requires_grad:
        return
    total.backward()
    assert all(not tensor.grad.any() for tensor in example.values() if tensor.requires_grad)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rows", [0, 3])
def test_the_mean_over_no_targets_is_zero_with_zero_gradients(backend, rows):
    """A rank whose tokens are all ignored adds zero to a sum over ranks, not NaN."""
    logits, targets = torch.randn(rows, 5, requires_grad=True), torch.full((rows,), -100)
    weight = torch.randn(4, 5, requires_grad=True)
    with ms_kernels.use_backend(backend):
        losses = (
            ms_kernels.cross_entropy(logits, targets),
            ms_kernels.linear_cross_entropy(logits, weight, targets),
        )
        sum(losses).backward()
    assert [loss.item() for loss in losses] == [0, 0]
    assert not logits.grad.any()
    assert not weight.grad.any()


class Hostile:
    """An object whose repr raises."""

    def __repr__(self):
        raise RuntimeError("no")


INVALID_NUMBERS = [
    *(math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000, 1e39, 10**39, 1j, b"1", "1"),
    *([], {}, (1, 2, 3), (0.9, math.nan), (10**400, 0.9), (True, 0.9), Hostile(), torch.ones(2)),
]
INVALID_NUMBERS_AND_BOOLS = [*INVALID_NUMBERS, True, False]
OPTIONS = [(name, option) for name, contract in CONTRACTS.items() for option in contract.options]


@pytest.mark.parametrize(("operator", "option"), OPTIONS, ids=lambda it: getattr(it, "name", it))
def test_options_reject_anything_but_finite_numbers_and_known_words(operator, option):
    """One short line, before any backend is chosen."""
    invalid = INVALID_NUMBERS if isinstance(option.default, bool) else INVALID_NUMBERS_AND_BOOLS
    for value in invalid:
        with pytest.raises(ArgumentError) as caught:
            call_with(operator, **{option.name: value})
        assert caught.value.argument == option.name
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_an_equal_value_of_another_type_is_still_refused():
    """1, 1.0 and True are one dictionary key but not one option value."""
    q = torch.randn(1, 4, 2, 8)
    ms_kernels.attention(q, q, q, window=1, causal=True)
    for override in ({"window": 1.0}, {"window": True}, {"causal": 1}):
        with pytest.raises(ArgumentError):
            ms_kernels.attention(q, q, q, **{"window": 1, "causal": True, **override})


@pytest.mark.parametrize("indices", [[0, 0, 1, 2], [0, 1, 2, 4], [0, 1, 2, -1]])
def test_indices_that_are_not_a_permutation_are_refused_on_the_cpu(indices):
    """A repeated row would get two gradients, and a missing one none."""
    places = torch.tensor(indices).view(2, 2)
    with pytest.raises(ArgumentError, match="unpermute_tokens: places is"):
        ms_kernels.unpermute_tokens(torch.randn(4, 3), places)
