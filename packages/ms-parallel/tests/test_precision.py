"""The cost of mixed precision on this processor."""

import logging

import pytest
import torch

from ms_parallel.split import precision
from ms_parallel.split.precision import bfloat16_slowdown, warn_of_slow_bfloat16


def test_slow_bfloat16_warns_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line if the product is slower than the limit, and none otherwise."""
    assert bfloat16_slowdown() > 0
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(precision, "SLOWDOWN_TO_WARN", 0.0)
        warn_of_slow_bfloat16(torch.device("cpu"))
        monkeypatch.setattr(precision, "SLOWDOWN_TO_WARN", 1e9)
        warn_of_slow_bfloat16(torch.device("cpu"))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "this processor has no bfloat16 matrix product, so bfloat16 takes longer" in line
    assert "\n" not in line
