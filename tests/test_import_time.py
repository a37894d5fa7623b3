"""Importing a package is quick: names are imported when they are first used."""

import os
import statistics
import subprocess
import sys

import pytest

from packages import PACKAGES, module_of

RUNS = 3
MAX_S = 0.15
"""CPU time beyond Python's own. A loaded machine takes 1.5 times longer than an idle one,
where the slowest package needs 0.02."""
HEAVY = ("torch", "numpy", "transformers", "pyarrow", "triton")


def cpu_time_s(code: str) -> float:
    """Median CPU time of a few processes."""
    times_s = []
    for _ in range(RUNS):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        user = after.children_user - before.children_user
        times_s.append(user + after.children_system - before.children_system)
    return statistics.median(times_s)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_is_fast(package: str) -> None:
    """At most 0.15 s of CPU time, without torch, numpy or another heavy library."""
    module = module_of(package)
    assert cpu_time_s(f"import {module}") - cpu_time_s("pass") <= MAX_S
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    """Every lazily imported name exists in its module."""
    modules = [module_of(package) for package in PACKAGES]
    code = (
        f"from importlib import import_module; modules = map(import_module, {modules})\n"
        "print([(m.__name__, n) for m in modules for n in m.__all__ if not hasattr(m, n)])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
