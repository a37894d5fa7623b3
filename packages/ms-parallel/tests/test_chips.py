"""The table of known chips."""

import pytest

from ms_parallel.errors import ConfigError
from ms_parallel.planner.roofline.chips import CHIPS, Chip, chip_named


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_chip_has_a_source_and_consistent_rates(chip: Chip) -> None:
    """Rates are without sparsity: half the bits at most double a rate."""
    assert chip.source
    rates = chip.peak_tflops
    assert rates["float16"] > rates.get("tf32", rates.get("float32", 0))
    if "float8" in rates:
        assert rates["float8"] == pytest.approx(2 * rates["float16"], rel=2e-3)
    # 50 to 400 FLOPs per byte of memory bandwidth, as all chips of this decade.
    assert 50 < chip.peak("float16") / (chip.memory_gb_per_s * 1e9) < 400
    assert chip.link_gb_per_s < chip.memory_gb_per_s


def test_unknown_chips_and_dtypes_are_refused_with_suggestions() -> None:
    """The one-line error suggests the nearest name."""
    with pytest.raises(ConfigError, match=r"unknown chip 'ascend-910d'.*ascend-910"):
        chip_named("ascend-910d")
    with pytest.raises(ConfigError, match="a100-80 has no float8 matrix products; use one of"):
        chip_named("a100-80").peak("float8")
    with pytest.raises(ConfigError, match="'bfloat'"):
        Chip(
            name="x",
            memory_gib=1,
            memory_gb_per_s=1,
            peak_tflops={"bfloat": 1},
            link_gb_per_s=1,
            source="none",
        )
