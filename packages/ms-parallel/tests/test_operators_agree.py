"""The two implementations of `ops=`, plain torch and ms_kernels, agree on every option.

Values and gradients of each operator of the protocol are compared on random calls. A model must not
compute a different function with other operators.
"""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_kernels
from ms_parallel import operators as ops
from ms_parallel.engine.output import HeadOutput, LogitsOutput
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.operators import losses

# Both sum in float32 and round once or twice, so results differ by two units in the last place of
# their dtype, plus float32's error for sums of about a hundred terms of order one. Attention also
# rounds probabilities and the outputs its backward pass starts from: four units of values up to 4,
# absolute. Gradients of logits are rounded before a product with 33 features, which doubles the
# error.
TOLERANCE = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 5e-5),
    torch.bfloat16: (2**-6, 2**-5),
    torch.float16: (2**-9, 2**-8),
}
DTYPES = list(TOLERANCE)
REDUCTIONS = ["mean", "sum", "none"]
SHAPES = (2, 5, 8), (33, 8)
"""Shapes of hidden states and of a head's weight."""


def random_leaf(generator, *shape, dtype):
    """Normal random numbers as a leaf tensor."""
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def rms_norm_call(data, generator, dtype):
    """A call of rms_norm, whose weight may have a different dtype than x."""
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    weight_dtype = data.draw(st.sampled_from([dtype, torch.float32]))
    tensors = (
        random_leaf(generator, rows, 2, width, dtype=dtype),
        random_leaf(generator, width, dtype=weight_dtype),
    )
    return tensors, {"eps": data.draw(st.sampled_from([1e-6, 0.5]))}


def rotary_call(data, generator, dtype):
    """A call of rotary on all or some features, with one table or one per row."""
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9))
    half, unrotated = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))
    tables = data.draw(st.sampled_from([1, rows]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.randn(tables, length, half, generator=generator, dtype=torch.float64)
    tensors = (
        random_leaf(generator, rows, length, 4, 2 * half + unrotated, dtype=dtype),
        random_leaf(generator, rows, length, 2, 2 * half + unrotated, dtype=dtype),
        angles.cos().to(wide),
        angles.sin().to(wide),
    )
    return tensors, {"interleaved": data.draw(st.booleans())}


def swiglu_call(data, generator, dtype):
    """A call of swiglu."""
    shape = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    return tuple(random_leaf(generator, *shape, dtype=dtype) for _ in range(2)), {}


def geglu_call(data, generator, dtype):
    """A call of geglu, exact or with tanh."""
    tensors, _ = swiglu_call(data, generator, dtype)
    return tensors, {"approximate": data.draw(st.sampled_from(["none", "tanh"]))}


def attention_call(data, generator, dtype):
    """A call of attention with grouped queries, a cache, masks, any value width and sinks."""
    rows, keys = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    queries = data.draw(st.sampled_from([keys, 1, max(keys - 3, 1)]))
    groups, width = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 16))
    heads = groups * data.draw(st.integers(1, 3))
    tensors = (
        random_leaf(generator, rows, queries, heads, width, dtype=dtype),
        random_leaf(generator, rows, keys, groups, width, dtype=dtype),
        random_leaf(
            generator, rows, keys, groups, data.draw(st.sampled_from([width, 7])), dtype=dtype
        ),
    )
    starts = torch.rand(rows, keys, generator=generator) < 0.2
    sinks = random_leaf(generator, heads, dtype=data.draw(st.sampled_from([dtype, torch.float32])))
    return tensors, {
        "sinks": sinks if data.draw(st.booleans()) else None,
        "causal": data.draw(st.booleans()),
        "documents": starts.cumsum(-1).int() if data.draw(st.booleans()) else None,
        "window": data.draw(st.sampled_from([None, 1, 2, 5, 19, 20, 100])),
        "scale": data.draw(st.sampled_from([None, 0.3])),
    }


def linear_cross_entropy_call(data, generator, dtype):
    """A call of linear_cross_entropy; sometimes all targets are ignored."""
    rows, width = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 33))
    count, ignored = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([-100, 0, 3]))
    targets = torch.randint(count, (rows,), generator=generator)
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    targets[torch.rand(rows, generator=generator) < share] = ignored
    hidden = random_leaf(generator, rows, width, dtype=dtype)
    # Plain torch rounds logits to their dtype; at order one that error is below the gradients'.
    weight = torch.randn(count, width, generator=generator) * width**-0.5
    weight = weight.to(dtype).requires_grad_()
    return (hidden, weight, targets), {
        "ignore_index": ignored,
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
    }


def cross_entropy_call(data, generator, dtype):
    """A call of cross_entropy on logits of order one; sometimes all targets are ignored."""
    rows, count = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 40))
    targets = torch.randint(count, (rows,), generator=generator)
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    targets[torch.rand(rows, generator=generator) < share] = -100
    return (random_leaf(generator, rows, count, dtype=dtype), targets), {
        "z_loss": data.draw(st.sampled_from([0.0, 0.1])),
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
    }


def permute_call(data, generator, dtype):
    """A call of permute_tokens; experts may get no token, and a token may pick one twice."""
    tokens, choices = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 9))
    experts = torch.randint(count, (tokens, choices), generator=generator)
    return (random_leaf(generator, tokens, data.draw(st.integers(1, 16)), dtype=dtype), experts), {
        "count": count
    }


def grouped_matmul_call(data, generator, dtype):
    """A call of grouped_matmul, with widths that kernels support and others."""
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6)))
    widths = st.sampled_from([1, 5, 8, 24])
    inner, outer = data.draw(widths), data.draw(widths)
    x = random_leaf(generator, int(counts.sum()), inner, dtype=dtype)
    return (x, random_leaf(generator, len(counts), inner, outer, dtype=dtype), counts), {}


def unpermute_call(data, generator, dtype):
    """A call of unpermute_tokens, with weights of any dtype or none."""
    tokens, choices = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
    positions = torch.randperm(tokens * choices, generator=generator).view(tokens, choices)
    rows = random_leaf(generator, tokens * choices, data.draw(st.integers(1, 16)), dtype=dtype)
    weight_dtype = data.draw(st.sampled_from([dtype, torch.float32, None]))
    weights = (
        None
        if weight_dtype is None
        else random_leaf(generator, tokens, choices, dtype=weight_dtype)
    )
    return (rows, positions), {"weights": weights}


def random_documents(data, generator, rows, length):
    """Documents of rows, whose ids may recur, or None."""
    ids = torch.randint(2, (rows, length), generator=generator, dtype=torch.int32)
    return ids if data.draw(st.booleans()) else None


def conv_call(data, generator, dtype):
    """A call of causal_conv1d, with rows shorter than the kernel among others."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    channels, taps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    tensors = [random_leaf(generator, rows, length, channels, dtype=dtype)]
    tensors.append(random_leaf(generator, channels, taps, dtype=dtype))
    bias = random_leaf(generator, channels, dtype=dtype)
    return (*tensors, bias if data.draw(st.booleans()) else None), {
        "documents": random_documents(data, generator, rows, length),
        "silu": data.draw(st.booleans()),
    }


def delta_rule_call(data, generator, dtype):
    """A call of gated_delta_rule: several chunks, shared keys, decays in float32."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 5, 12, 70]))
    keys, width = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8))
    heads, normalize = keys * data.draw(st.integers(1, 2)), data.draw(st.booleans())
    q, k = (random_leaf(generator, rows, length, keys, width, dtype=dtype) for _ in range(2))
    if not normalize:  # with keys longer than 1, the state would grow at every position
        k = torch.nn.functional.normalize(k.detach(), dim=-1).requires_grad_()
    v = random_leaf(generator, rows, length, heads, data.draw(st.integers(1, 8)), dtype=dtype)
    gate_dtype = data.draw(st.sampled_from([dtype, torch.float32]))
    g, beta = (
        torch.rand(rows, length, heads, generator=generator)
        .mul(factor)
        .to(gate_dtype)
        .requires_grad_()
        for factor in (-2.0, 1.0)
    )
    return (q, k, v, g, beta), {
        "documents": random_documents(data, generator, rows, length),
        "scale": data.draw(st.sampled_from([None, 0.3])),
        "normalize": normalize,
    }


CALLS = {
    "causal_conv1d": conv_call,
    "gated_delta_rule": delta_rule_call,
    "permute_tokens": permute_call,
    "grouped_matmul": grouped_matmul_call,
    "unpermute_tokens": unpermute_call,
    "rms_norm": rms_norm_call,
    "rotary": rotary_call,
    "geglu": geglu_call,
    "swiglu": swiglu_call,
    "attention": attention_call,
    "cross_entropy": cross_entropy_call,
    "linear_cross_entropy": linear_cross_entropy_call,
}


def as_leaf(value):
    """A copy of a tensor as a leaf; other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def outputs_and_grads(function, tensors, options):
    """Outputs, and gradients of the leaves for output gradients that vary between elements."""
    args = [as_leaf(tensor) for tensor in tensors]
    kwargs = {name: as_leaf(value) for name, value in options.items()}
    output = function(*args, **kwargs)
    outputs = output if isinstance(output, tuple) else (output,)
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    grads = [torch.linspace(0.5, 1.5, root.numel()).view_as(root).to(root) for root in roots]
    torch.autograd.backward(roots, grads)
    leaves = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return [*outputs, *(tensor.grad for tensor in leaves if tensor.requires_grad)]


def assert_equal_results(name, tensors, options, dtype):
    """Check that both implementations give the same outputs, gradients and dtypes."""
    relative, absolute = TOLERANCE[dtype]
    results = (
        outputs_and_grads(getattr(module, name), tensors, options) for module in (ops, ms_kernels)
    )
    for plain, fused in zip(*results, strict=True):
        assert (plain.dtype, plain.shape) == (fused.dtype, fused.shape)
        torch.testing.assert_close(plain, fused, rtol=relative, atol=absolute)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_both_namespaces_compute_the_same(name, data):
    """Every option of every operator in four dtypes, values and gradients."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = CALLS[name](data, generator, dtype)
    assert_equal_results(name, tensors, options, dtype)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "cross_entropy"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunked_losses_agree(name, data):
    """Logits are computed a few rows at a time, and again in the backward pass."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = CALLS["linear_cross_entropy"](data, generator, dtype)
    default_chunk_bytes, losses._CHUNK_BYTES = losses._CHUNK_BYTES, 512
    try:
        if name == "cross_entropy":
            hidden, weight, targets = tensors
            logits = (hidden @ weight.T).detach().requires_grad_()
            tensors = logits, targets
            options["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.1]))
            options["z_loss"] = data.draw(st.sampled_from([0.0, 0.01]))
        assert_equal_results(name, tensors, options, dtype)
    finally:
        losses._CHUNK_BYTES = default_chunk_bytes


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=1, deadline=None)
@given(data=st.data())
def test_every_option_of_the_protocol_is_tested(name, data):
    """An option added to the protocol must be added here."""
    tensors, options = CALLS[name](data, torch.Generator(), torch.float32)
    protocol = list(inspect.signature(getattr(ops.Ops, name)).parameters)[1:]
    assert len(protocol) == len(tensors) + len(options)
    assert set(options) <= set(protocol)


def test_every_operator_of_the_protocol_is_tested():
    """CALLS has every operator of the protocol."""
    assert {name for name in vars(ops.Ops) if not name.startswith("_")} == set(CALLS)


@pytest.mark.parametrize("namespace", [ops, ms_kernels])
@pytest.mark.parametrize("chunk_bytes", [1 << 28, 8])
def test_an_out_of_range_target_is_refused(namespace, chunk_bytes, monkeypatch):
    """It is not clamped to the first or the last class."""
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    for wrong in (-1, 5):
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            namespace.linear_cross_entropy(hidden, weight, torch.tensor([0, wrong, 1, 2]))


@settings(max_examples=20)
@given(st.data())
def test_losses_and_entropies_at_a_temperature_agree(data):
    """Values and gradients of a head's output; ms_kernels does not store the logits."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    temperature = data.draw(st.sampled_from([0.3, 1.0, 2.0]))
    hidden = random_leaf(generator, 2, 5, 8, dtype=dtype)
    weight = random_leaf(generator, 33, 8, dtype=dtype)
    targets = torch.randint(33, (2, 5), generator=generator)
    targets[torch.rand(2, 5, generator=generator) < 0.3] = -100
    counted, factors = targets != -100, torch.randn(2, 2, 5, generator=generator)
    results = []
    for operators in (ops, ms_kernels):
        output = HeadOutput(hidden, weight, operators, None, {}, split=False)
        values = (
            output.token_losses(targets, temperature=temperature),
            output.entropies(counted, temperature=temperature),
        )
        total = sum((value * factor).sum() for value, factor in zip(values, factors, strict=True))
        results.append([*values, *torch.autograd.grad(total, (hidden, weight))])
    rtol, atol = TOLERANCE[dtype]
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=rtol, atol=atol)
    # Losses of a module that returns logits.
    logits = random_leaf(generator, 2, 5, 33, dtype=dtype)
    plain, fused = (
        LogitsOutput(logits, operators).token_losses(targets, temperature=temperature, z_loss=0.1)
        for operators in (ops, ms_kernels)
    )
    torch.testing.assert_close(fused, plain, rtol=rtol, atol=atol)
    grads = (torch.autograd.grad((x * factors[0]).sum(), logits)[0] for x in (fused, plain))
    torch.testing.assert_close(*grads, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_sum_agrees_with_and_without_a_hook(monkeypatch, dtype):
    """ms_kernels adds and normalizes in one operator, unless the norm's module must be called."""
    generator, calls = torch.Generator().manual_seed(0), []
    fused = ms_kernels.add_rms_norm
    monkeypatch.setattr(
        ms_kernels, "add_rms_norm", lambda *args: calls.append(args) or fused(*args)
    )
    x, branch = (random_leaf(generator, 3, 4, 40, dtype=dtype) for _ in range(2))
    factors = torch.randn(2, 3, 4, 40, generator=generator)
    results = []
    for operators, is_hooked in ((ops, False), (ms_kernels, True), (ms_kernels, False)):
        norm = RMSNorm(40, 1e-6, operators).to(dtype)
        if is_hooked:
            norm.register_forward_hook(lambda *_: None)
        sums = norm.of_sum(x, branch)
        total = sum((y * factor).sum() for y, factor in zip(sums, factors, strict=True))
        results.append([*sums, *torch.autograd.grad(total, (x, branch, norm.weight))])
        assert len(calls) == (operators is ms_kernels and not is_hooked)
    rtol, atol = TOLERANCE[dtype]
    for other in results[1:]:
        for expected, result in zip(results[0], other, strict=True):
            torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def test_weighted_losses_compute_the_logits_once(monkeypatch):
    """Without `reduction="none"`, which would compute them again in the backward pass."""
    generator, reductions = torch.Generator().manual_seed(0), []
    loss = ops.linear_cross_entropy

    def spy(*args, reduction="mean", **options):
        reductions.append(reduction)
        return loss(*args, reduction=reduction, **options)

    monkeypatch.setattr(ops, "linear_cross_entropy", spy)
    hidden, weight = (random_leaf(generator, *shape, dtype=torch.float32) for shape in SHAPES)
    targets = torch.randint(33, (2, 5), generator=generator)
    weights = torch.rand(2, 5, generator=generator)
    output = HeadOutput(hidden, weight, ms_kernels, None, {}, split=False)
    weighted = output.loss_sum(targets, weights=weights)
    assert reductions == ["sum"]
    expected = (output.token_losses(targets) * weights).sum()
    torch.testing.assert_close(weighted, expected)
    for result, grad in zip(
        torch.autograd.grad(weighted, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(result, grad)
