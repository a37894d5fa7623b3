"""rotary_table: the cosines and sines of transformers for every kind of scaling."""

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


def transformers_table(parameters, width, base):
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
def test_tables_match_transformers(scaling, parameters, width, base):
    """Up to float32 rounding of the angle: 1e5 radians are known to about 4e-3."""
    tables = rotary_table(torch.arange(LENGTH), width=width, base=base, scaling=scaling)
    expected_tables = transformers_table(parameters, width, base)
    for table, expected in zip(tables, expected_tables, strict=True):
        assert (table.shape, table.dtype) == ((1, LENGTH, width // 2), torch.float32)
        torch.testing.assert_close(table, expected, rtol=0, atol=2e-2)
        # The tight tolerance on small angles would reveal a wrong formula.
        torch.testing.assert_close(table[:, :64], expected[:, :64], rtol=0, atol=2e-5)


def test_batched_positions_get_one_row_each():
    """Positions (C, S) that restart give the same angles for the same position."""
    positions = torch.stack((torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])))
    cos, sin = rotary_table(positions, width=8)
    assert cos.shape == sin.shape == (2, 6, 4)
    assert torch.equal(cos[1, 3:], cos[0, :3])
    q = torch.randn(2, 6, 2, 8)
    rotated, _ = rotary(q, q, cos, sin)
    assert torch.equal(rotated[:, 0], q[:, 0])
    # Rotation preserves norms: float32 roundings of 8 terms.
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize(
    ("make", "message"),
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
def test_bad_settings_are_refused(make, message):
    """The error names the setting and its value."""
    with pytest.raises((ArgumentError, ValueError)) as caught:
        make()
    assert message in str(caught.value)


def test_a_table_compiles_without_a_graph_break():
    """A model may compute its tables in compiled code."""
    scaling = YarnScaling(factor=4, original_length=64)

    def table(positions):
        return rotary_table(positions, width=16, scaling=scaling)

    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    for compiled_table, plain_table in zip(
        compiled(torch.arange(9)), table(torch.arange(9)), strict=True
    ):
        torch.testing.assert_close(compiled_table, plain_table)
