"""rotary_table: cosines and sines as transformers computes them, for each kind of scaling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ms_kernels import (
    ArgumentError,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    rotary,
    rotary_table,
)

LENGTH = 100_000
SCALINGS = [
    (LinearScaling(factor=4), {"rope_type": "linear", "factor": 4.0}),
    (
        Llama3Scaling(),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        Llama3Scaling(factor=32, slow_turns=0.5, fast_turns=9, original_length=1000),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 9.0,
            "original_max_position_embeddings": 1000,
        },
    ),
    (
        YarnScaling(factor=16, original_length=4096),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    (
        YarnScaling(
            factor=40,
            original_length=4096,
            fast_turns=20,
            slow_turns=2,
            attention_factor=1.2,
            whole_pairs=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.2,
            "truncate": False,
        },
    ),
]


def table_of_transformers(parameters, width, base):
    """Return cosines and sines (1, S, R/2) from transformers' frequencies."""
    config = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": base, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    angles = torch.arange(LENGTH).float()[None, :, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize(("scaling", "parameters"), SCALINGS)
@pytest.mark.parametrize(("width", "base"), [(64, 10000.0), (128, 500000.0)])
def test_tables_are_those_of_transformers(scaling, parameters, width, base):
    """To what float32 keeps of an angle: 1e5 radians are known to 4e-3, a rounding or two."""
    got = rotary_table(torch.arange(LENGTH), width=width, base=base, scaling=scaling)
    truth = table_of_transformers(parameters, width, base)
    for each, expected in zip(got, truth, strict=True):
        assert (each.shape, each.dtype) == ((1, LENGTH, width // 2), torch.float32)
        torch.testing.assert_close(each, expected, rtol=0, atol=2e-2)
        # Small angles leave no room for a wrong formula.
        torch.testing.assert_close(each[:, :64], expected[:, :64], rtol=0, atol=2e-5)


def test_positions_of_a_batch_have_a_row_each():
    """Positions (C, S) that restart give the same angles where they are the same."""
    positions = torch.stack((torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])))
    cos, sin = rotary_table(positions, width=8)
    assert cos.shape == sin.shape == (2, 6, 4)
    assert torch.equal(cos[1, 3:], cos[0, :3])
    q = torch.randn(2, 6, 2, 8)
    turned, _ = rotary(q, q, cos, sin)
    assert torch.equal(turned[:, 0], q[:, 0])
    # A turn keeps lengths: float32 roundings of 8 terms.
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: rotary_table(torch.arange(3.0), width=8), "positions is float32"),
        (lambda: rotary_table([1, 2], width=8), "positions is no tensor"),
        (lambda: rotary_table(torch.zeros(1, 1, 1).int(), width=8), "(C, S) or (S,)"),
        (lambda: rotary_table(torch.arange(3), width=7), "width is 7; it must be an even number"),
        (lambda: rotary_table(torch.arange(3), width=8, base=1), "base is 1"),
        (lambda: Llama3Scaling(fast_turns=1.0), "fast_turns is 1.0"),
        (lambda: LinearScaling(factor=0.5), "factor"),
        (lambda: YarnScaling(factor=2, original_length=0), "original_length"),
    ],
)
def test_bad_settings_are_told(make, told):
    """Each names what is wrong."""
    with pytest.raises((ArgumentError, ValueError)) as caught:
        make()
    assert told in str(caught.value)


def test_a_table_compiles_without_a_graph_break():
    """A model may make its tables inside what is compiled."""
    scaling = YarnScaling(factor=4, original_length=64)

    def table(positions):
        return rotary_table(positions, width=16, scaling=scaling)

    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    for got, truth in zip(compiled(torch.arange(9)), table(torch.arange(9)), strict=True):
        torch.testing.assert_close(got, truth)
