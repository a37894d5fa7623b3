"""The two namespaces that a model may be given as `ops=` mean the same by every option.

`ms_parallel.operators` in plain torch, and `ms_kernels`: each operator of the Protocol, values and
gradients, on calls drawn at random. A model must not learn another function by its operators.
"""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_kernels
from ms_parallel import operators as ops
from ms_parallel.operators import losses

# Both sum in float32 and round once or twice, so results differ by two units in the last place of
# their dtype, and by float32's own error of sums of about a hundred terms of order one. Attention
# rounds probabilities and the results it sums back from: four units of values up to 4, absolute.
# Of a gradient of logits, rounded before it meets 33 features of order one, as much again.
TOLERANCE = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 5e-5),
    torch.bfloat16: (2**-6, 2**-5),
    torch.float16: (2**-9, 2**-8),
}
DTYPES = list(TOLERANCE)
REDUCTIONS = ["mean", "sum", "none"]


def drawn(generator, *shape, dtype):
    """Normal numbers, as a leaf."""
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def normalizing(data, generator, dtype):
    """A call of rms_norm: its weight may be of another dtype than x."""
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    other = data.draw(st.sampled_from([dtype, torch.float32]))
    tensors = (
        drawn(generator, rows, 2, width, dtype=dtype),
        drawn(generator, width, dtype=other),
    )
    return tensors, {"eps": data.draw(st.sampled_from([1e-6, 0.5]))}


def turning(data, generator, dtype):
    """A call of rotary, of the whole width or part of it, with one table or one a row."""
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9))
    half, more = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))
    tables = data.draw(st.sampled_from([1, rows]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.randn(tables, length, half, generator=generator, dtype=torch.float64)
    tensors = (
        drawn(generator, rows, length, 4, 2 * half + more, dtype=dtype),
        drawn(generator, rows, length, 2, 2 * half + more, dtype=dtype),
        angles.cos().to(wide),
        angles.sin().to(wide),
    )
    return tensors, {"interleaved": data.draw(st.booleans())}


def gating(data, generator, dtype):
    """A call of swiglu."""
    shape = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    return tuple(drawn(generator, *shape, dtype=dtype) for _ in range(2)), {}


def gating_by_gelu(data, generator, dtype):
    """A call of geglu, exact or by tanh."""
    tensors, _ = gating(data, generator, dtype)
    return tensors, {"approximate": data.draw(st.sampled_from(["none", "tanh"]))}


def attending(data, generator, dtype):
    """A call of attention: grouped queries, a cache, masks, values of any width, sinks."""
    rows, keys = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    queries = data.draw(st.sampled_from([keys, 1, max(keys - 3, 1)]))
    groups, width = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 16))
    heads = groups * data.draw(st.integers(1, 3))
    tensors = (
        drawn(generator, rows, queries, heads, width, dtype=dtype),
        drawn(generator, rows, keys, groups, width, dtype=dtype),
        drawn(generator, rows, keys, groups, data.draw(st.sampled_from([width, 7])), dtype=dtype),
    )
    starts = torch.rand(rows, keys, generator=generator) < 0.2
    sinks = drawn(generator, heads, dtype=data.draw(st.sampled_from([dtype, torch.float32])))
    return tensors, {
        "sinks": sinks if data.draw(st.booleans()) else None,
        "causal": data.draw(st.booleans()),
        "documents": starts.cumsum(-1).int() if data.draw(st.booleans()) else None,
        "window": data.draw(st.sampled_from([None, 1, 2, 5, 19, 20, 100])),
        "scale": data.draw(st.sampled_from([None, 0.3])),
    }


def with_loss(data, generator, dtype):
    """A call of linear_cross_entropy; sometimes no target counts."""
    rows, width = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 33))
    count, ignored = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([-100, 0, 3]))
    targets = torch.randint(count, (rows,), generator=generator)
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    targets[torch.rand(rows, generator=generator) < share] = ignored
    hidden = drawn(generator, rows, width, dtype=dtype)
    # Plain torch rounds logits to their dtype: at order one these are off by less than gradients.
    weight = torch.randn(count, width, generator=generator) * width**-0.5
    weight = weight.to(dtype).requires_grad_()
    return (hidden, weight, targets), {
        "ignore_index": ignored,
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
    }


def sorting(data, generator, dtype):
    """A call of permute_tokens; some experts are chosen by nobody, a token may choose one twice."""
    tokens, choices = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 9))
    experts = torch.randint(count, (tokens, choices), generator=generator)
    return (drawn(generator, tokens, data.draw(st.integers(1, 16)), dtype=dtype), experts), {
        "count": count
    }


def grouping(data, generator, dtype):
    """A call of grouped_matmul, of widths that kernels take and of others."""
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6)))
    widths = st.sampled_from([1, 5, 8, 24])
    inner, outer = data.draw(widths), data.draw(widths)
    x = drawn(generator, int(counts.sum()), inner, dtype=dtype)
    return (x, drawn(generator, len(counts), inner, outer, dtype=dtype), counts), {}


def leading_back(data, generator, dtype):
    """A call of unpermute_tokens, with weights of any dtype or none."""
    tokens, choices = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
    places = torch.randperm(tokens * choices, generator=generator).view(tokens, choices)
    rows = drawn(generator, tokens * choices, data.draw(st.integers(1, 16)), dtype=dtype)
    other = data.draw(st.sampled_from([dtype, torch.float32, None]))
    weights = None if other is None else drawn(generator, tokens, choices, dtype=other)
    return (rows, places), {"weights": weights}


def packed(data, generator, rows, length):
    """Documents of rows whose numbers may come back later, or None."""
    numbers = torch.randint(2, (rows, length), generator=generator, dtype=torch.int32)
    return numbers if data.draw(st.booleans()) else None


def convolving(data, generator, dtype):
    """A call of causal_conv1d: rows shorter than its taps among them."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    channels, taps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    tensors = [drawn(generator, rows, length, channels, dtype=dtype)]
    tensors.append(drawn(generator, channels, taps, dtype=dtype))
    bias = drawn(generator, channels, dtype=dtype)
    return (*tensors, bias if data.draw(st.booleans()) else None), {
        "documents": packed(data, generator, rows, length),
        "silu": data.draw(st.booleans()),
    }


def remembering(data, generator, dtype):
    """A call of gated_delta_rule: several chunks, heads that share keys, decays in float32."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 5, 12, 70]))
    keys, width = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8))
    heads, normalize = keys * data.draw(st.integers(1, 2)), data.draw(st.booleans())
    q, k = (drawn(generator, rows, length, keys, width, dtype=dtype) for _ in range(2))
    if not normalize:  # With longer keys the state grows at every position.
        k = torch.nn.functional.normalize(k.detach(), dim=-1).requires_grad_()
    v = drawn(generator, rows, length, heads, data.draw(st.integers(1, 8)), dtype=dtype)
    other = data.draw(st.sampled_from([dtype, torch.float32]))
    g, beta = (
        torch.rand(rows, length, heads, generator=generator).mul(factor).to(other).requires_grad_()
        for factor in (-2.0, 1.0)
    )
    return (q, k, v, g, beta), {
        "documents": packed(data, generator, rows, length),
        "scale": data.draw(st.sampled_from([None, 0.3])),
        "normalize": normalize,
    }


CALLS = {
    "causal_conv1d": convolving,
    "gated_delta_rule": remembering,
    "permute_tokens": sorting,
    "grouped_matmul": grouping,
    "unpermute_tokens": leading_back,
    "rms_norm": normalizing,
    "rotary": turning,
    "geglu": gating_by_gelu,
    "swiglu": gating,
    "attention": attending,
    "linear_cross_entropy": with_loss,
}


def leaf(value):
    """The same numbers as a leaf of their own; what is no tensor stays."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def answers(function, tensors, options):
    """Results, and the gradients of the leaves for pulls that differ from number to number."""
    given = [leaf(each) for each in tensors]
    named = {name: leaf(each) for name, each in options.items()}
    found = function(*given, **named)
    results = found if isinstance(found, tuple) else (found,)
    pulled = [each for each in results if each.requires_grad]
    pulls = [torch.linspace(0.5, 1.5, each.numel()).view_as(each).to(each) for each in pulled]
    torch.autograd.backward(pulled, pulls)
    leaves = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
    return [*results, *(each.grad for each in leaves if each.requires_grad)]


def assert_alike(name, tensors, options, dtype):
    """Both namespaces give the same results and gradients, of the same dtypes."""
    relative, absolute = TOLERANCE[dtype]
    both = (answers(getattr(each, name), tensors, options) for each in (ops, ms_kernels))
    for plain, fused in zip(*both, strict=True):
        assert (plain.dtype, plain.shape) == (fused.dtype, fused.shape)
        torch.testing.assert_close(plain, fused, rtol=relative, atol=absolute)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_both_namespaces_compute_the_same(name, data):
    """Every option of every operator of the Protocol, in four dtypes: values and gradients."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = CALLS[name](data, generator, dtype)
    assert_alike(name, tensors, options, dtype)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "cross_entropy"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_losses_made_in_chunks_are_the_same(name, data):
    """Where logits are made a few rows at a time and made again in the backward pass."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = CALLS["linear_cross_entropy"](data, generator, dtype)
    whole, losses._CHUNK_BYTES = losses._CHUNK_BYTES, 512
    try:
        if name == "cross_entropy":
            hidden, weight, targets = tensors
            logits = (hidden @ weight.T).detach().requires_grad_()
            tensors = logits, targets
            options["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.1]))
            options["z_loss"] = data.draw(st.sampled_from([0.0, 0.01]))
        assert_alike(name, tensors, options, dtype)
    finally:
        losses._CHUNK_BYTES = whole


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=1, deadline=None)
@given(data=st.data())
def test_every_option_of_the_protocol_is_drawn(name, data):
    """An option that is added to the Protocol must be drawn here as well."""
    tensors, options = CALLS[name](data, torch.Generator(), torch.float32)
    protocol = list(inspect.signature(getattr(ops.Ops, name)).parameters)[1:]
    assert len(protocol) == len(tensors) + len(options)
    assert set(options) <= set(protocol)


def test_every_operator_of_the_protocol_is_held():
    """The Protocol's operators are those of this file."""
    assert {name for name in vars(ops.Ops) if not name.startswith("_")} == set(CALLS)


@pytest.mark.parametrize("namespace", [ops, ms_kernels])
@pytest.mark.parametrize("chunk_bytes", [1 << 28, 8])
def test_a_target_that_is_no_class_is_refused(namespace, chunk_bytes, monkeypatch):
    """Neither the first class nor the last one is taken for it."""
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    for wrong in (-1, 5):
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            namespace.linear_cross_entropy(hidden, weight, torch.tensor([0, wrong, 1, 2]))
