"""Rotary positions have the angles of transformers, for all scalings and document lengths."""

import copy
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ms_parallel.errors import ConfigError, ModelError, ParallelError
from ms_parallel.models import KeyValueCache, RopeScaling, architecture, build_model
from ms_parallel.models.positions.rope_format import read_rope, write_scaling
from ms_parallel.models.positions.scaling import Rope
from ms_parallel.models.positions.tables import document_ends, rotary_tables
from ms_parallel.models.registry import from_document
from ms_parallel.weights import initialize

transformers.utils.logging.set_verbosity_error()

ROPE_TYPES = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
LIMIT = 64
"""max_position_embeddings of the models here."""


def random_rope(rope_type: str, rng: Random, width: int) -> dict[str, Any]:
    """Random `rope_parameters` of a config.json."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": rng.choice([500.0, 1e4, 5e5])}
    if rope_type != "default":
        rope["factor"] = rng.choice([1.5, 2.0, 3.7, 8.0])
    if rope_type in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = rng.choice([16, 24, 48])
    if rope_type == "llama3":
        low, high = rng.choice([1.0, 1.3]), rng.choice([2.5, 4.0])
        rope |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope_type == "yarn":
        rope |= rng.choice([{}, {"beta_fast": 20.0, "beta_slow": 2.0}, {"beta_fast": 32}])
        rope |= rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": rng.choice([0.7, 1.0])}])
        rope |= rng.choice([{}, {"attention_factor": 1.2}, {"truncate": False}, {"factor": None}])
    if rope_type == "longrope":
        rope["short_factor"] = [1 + rng.random() for _ in range(width // 2)]
        rope["long_factor"] = [1 + 8 * rng.random() for _ in range(width // 2)]
        rope |= rng.choice([{}, {"attention_factor": 1.1}, {"factor": None}])
    return rope


def hf_tables(rope: dict[str, Any], width: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines by transformers for one text."""
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=LIMIT,
        rope_parameters=copy.deepcopy(rope),
    )
    tables = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return tuple(table[..., : width // 2] for table in tables)  # type: ignore[return-value]


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("seed", range(8))
def test_angles_are_those_of_transformers_bit_for_bit(rope_type: str, seed: int) -> None:
    """Also of texts beyond the limit; each setting that config.json may hold is drawn."""
    draw = Random(seed)
    width = draw.choice([8, 32, 128])
    rope = random_rope(rope_type, draw, width)
    theta, scaling = read_rope(rope, 10000.0)
    ours = Rope(theta=theta, width=width, scaling=scaling, max_position_embeddings=LIMIT)
    for length in (10, LIMIT, 200):
        positions = torch.arange(length)[None]
        tables = rotary_tables(ours, positions, document_ends(positions, None))
        for actual, expected in zip(tables, hf_tables(rope, width, length), strict=True):
            if rope_type == "dynamic" and length > LIMIT:
                # Bases differ by document, so the powers are tensor operations, whose last bit may
                # differ: 6e-8 of an angle of up to 200, and as much for its base.
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
            else:
                assert torch.equal(actual, expected)


@pytest.mark.parametrize("rope_type", ROPE_TYPES[1:])
def test_a_scaling_survives_a_write_and_a_read(rope_type: str) -> None:
    """Nothing that changes an angle is lost in config.json."""
    for seed in range(8):
        _, scaling = read_rope(random_rope(rope_type, Random(seed), 16), 10000.0)
        assert scaling is not None
        document = write_scaling(scaling)
        assert document is not None
        assert read_rope(document, 10000.0)[1] == scaling


def small(rope_type: str) -> Any:
    """A decoder with scaled rotary positions."""
    scaling = {k: v for k, v in random_rope(rope_type, Random(1), 8).items() if k != "rope_theta"}
    scaling["kind"] = scaling.pop("rope_type")
    if rope_type == "longrope":
        scaling["original_max_position_embeddings"] = 16
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 16,
    }
    model = build_model(architecture("llama", {**sizes, "rope_scaling": scaling}))
    initialize(model, 3)
    return model


@pytest.mark.parametrize("rope_type", ROPE_TYPES[1:])
@torch.no_grad()
def test_packed_documents_are_scaled_by_their_own_lengths(rope_type: str) -> None:
    """Two short documents and one beyond the limit give the logits of separate ones."""
    model, lengths = small(rope_type), (7, 24, 9)
    row = torch.randint(64, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    packed = model(row, positions=positions, documents=documents)
    separate = [model(part) for part in row.split(lengths, 1)]
    # A float32 rounding is 6e-8 of a value; logits here reach 10 after about 50 roundings.
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=3e-5, rtol=0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@torch.no_grad()
def test_a_text_that_outgrows_its_cache_is_refused(rope_type: str) -> None:
    """Its keys were rotated for shorter texts; up to the limit it is exact."""
    model = small(rope_type)
    row = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    cache = KeyValueCache()
    parts = [model(row[:, :10], cache=cache), model(row[:, 10:16], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, 1), model(row[:, :16]), atol=3e-5, rtol=0)
    with pytest.raises(
        ModelError, match=r"a sequence exceeds 16; generate at most 16 positions"
    ) as caught:
        model(row[:, 16:17], cache=cache)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_a_long_text_of_longrope_continues_in_its_cache() -> None:
    """Beyond the limit all lengths have the same angles."""
    model = small("longrope")
    row = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    cache = KeyValueCache()
    parts = [model(row[:, a:b], cache=cache) for a, b in ((0, 20), (20, 21), (21, 24))]
    torch.testing.assert_close(torch.cat(parts, 1), model(row), atol=3e-5, rtol=0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "ntk", "factor": 2.0}, "supported: default, linear, dynamic, llama3, yarn"),
    ({"rope_type": "yarn", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
    ({"rope_type": "dynamic"}, "needs 'factor'"),
    ({"rope_type": "linear", "factor": None}, "needs 'factor'"),
    ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
    (
        {
            "rope_type": "longrope",
            "short_factor": [1.0],
            "long_factor": [1.0],
            "original_max_position_embeddings": 8,
        },
        "short_factor must have one number for each of 16 frequencies, got 1",
    ),
    ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "'mrope_section' is not supp"),
]


@pytest.mark.parametrize(("rope", "message"), BAD)
def test_a_bad_scaling_is_refused_in_one_line(rope: dict[str, Any], message: str) -> None:
    """The message names the setting and valid values."""
    document = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rope_parameters": rope,
    }
    with pytest.raises(ParallelError, match=message) as caught:
        from_document(document)
    assert "\n" not in str(caught.value)


def test_an_invalid_scaling_is_refused_when_built() -> None:
    """Before a model is built."""
    with pytest.raises(ConfigError, match="'longrope' needs 'short_factor'"):
        RopeScaling(kind="longrope")
    with pytest.raises(ConfigError, match="even and at least 2, got 7"):
        Rope(theta=1e4, width=7, max_position_embeddings=8)
    scaling = RopeScaling(kind="yarn", factor=2.0)
    with pytest.raises(ConfigError, match="needs rope_theta above 1"):
        Rope(theta=1.0, width=8, scaling=scaling, max_position_embeddings=8)
