"""Packed weights: documented layout, round trips and rounding error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels import ArgumentError, quantized_linear
from ms_kernels.packed_weights import dequantize, pack_codes, quantize, unpack_codes


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 5), half=st.integers(0, 9), bits=st.sampled_from([4, 8]))
def test_codes_round_trip(rows, half, bits):
    """Unpacking is the inverse of packing."""
    codes = torch.randint(2**bits, (rows, 2 * half))
    packed = pack_codes(codes, bits=bits)
    assert (packed.shape, packed.dtype) == ((rows, 2 * half * bits // 8), torch.uint8)
    assert torch.equal(unpack_codes(packed, bits=bits).long(), codes)


def test_the_first_of_two_codes_is_in_the_low_nibble():
    """Files depend on this layout: byte = even code + 16 * odd code."""
    assert pack_codes(torch.tensor([[1, 2, 15, 0]]), bits=4).tolist() == [[0x21, 0x0F]]


@settings(max_examples=50, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([2, 6, 32]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rounding_error_is_at_most_half_a_step(bits, group_size, symmetric, seed):
    """Rounding is to the nearest code; with a zero point, its rounding adds another half step."""
    weight = torch.randn(5, 4 * group_size, generator=torch.Generator().manual_seed(seed))
    weight[0, :group_size] = 0
    packed, scales, zeros = quantize(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    restored = dequantize(packed, scales, zeros, bits=bits, group_size=group_size)
    steps = scales.repeat_interleave(group_size, 1)
    assert (zeros is None) == symmetric
    assert bool(
        ((restored - weight).abs() <= (0.5 if symmetric else 1) * steps * 1.001 + 1e-7).all()
    )
    assert bool((restored[0, :group_size] == 0).all())


def test_quantized_linear_equals_a_product_with_the_unpacked_matrix():
    """It multiplies weights packed by `quantize`; only x gets a gradient."""
    weight = torch.randn(24, 64)
    packed, scales, zeros = quantize(weight, bits=8, group_size=16, symmetric=False)
    x = torch.randn(3, 5, 64, requires_grad=True)
    scales.requires_grad_()
    result = quantized_linear(x, packed, scales, zeros, bits=8, group_size=16)
    matrix = dequantize(packed, scales.detach(), zeros, bits=8, group_size=16)
    # float32 sums of 64 terms of order one.
    torch.testing.assert_close(result, x @ matrix.T, rtol=1e-5, atol=1e-4)
    grad_out = torch.randn(3, 5, 24)
    result.backward(grad_out)
    torch.testing.assert_close(x.grad, grad_out @ matrix, rtol=1e-5, atol=1e-4)
    assert scales.grad is None
    # 8 bits: an error of about 0.5% of a group's largest weight, summed randomly.
    assert (result - x @ weight.T).abs().max() < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack_codes(torch.tensor([[16, 0]]), bits=4), "codes is 0 to 16; it must be from"),
        (lambda: pack_codes(torch.tensor([[-1, 0]]), bits=8), "codes is -1 to 0"),
        (lambda: pack_codes(torch.tensor([[1]]), bits=4), "K even"),
        (lambda: pack_codes(torch.ones(2, 2), bits=4), "codes is float32"),
        (lambda: pack_codes(torch.ones(2, 2).int(), bits=3), "bits is 3; it must be 4 or 8"),
        (lambda: unpack_codes(torch.ones(2, 2), bits=4), "packed is float32"),
        (lambda: quantize(torch.ones(2, 6), bits=4, group_size=4), "a divisor of 6"),
        (lambda: quantize(torch.ones(6), bits=4, group_size=2), "weight is float32 of shape (6,)"),
    ],
)
def test_bad_input_is_refused(make, message):
    """The error names the problem and the valid values."""
    with pytest.raises(ArgumentError) as caught:
        make()
    assert message in str(caught.value)
