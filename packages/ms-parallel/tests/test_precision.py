"""What mixed precision costs on the processor that is there."""

import logging

import pytest
import torch

from ms_parallel.split import precision
from ms_parallel.split.precision import bfloat16_slowdown, warn_of_slow_bfloat16


def test_a_slow_bfloat16_is_told_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, where the product takes longer than the limit; none where it does not."""
    assert bfloat16_slowdown() > 0
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(precision, "SLOWDOWN_TO_WARN", 0.0)
        warn_of_slow_bfloat16(torch.device("cpu"))
        monkeypatch.setattr(precision, "SLOWDOWN_TO_WARN", 1e9)
        warn_of_slow_bfloat16(torch.device("cpu"))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "this processor has no bfloat16 matrix product, so bfloat16 takes longer" in line
    assert "\n" not in line
