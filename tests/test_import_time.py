"""Importing a package is quick: names are imported when they are first used."""

import os
import statistics
import subprocess
import sys

import pytest

from packages import PACKAGES, module_of

RUNS = 3
MOST_S = 0.15
"""Processor time beyond Python's own. A loaded machine takes half as much again as an idle one,
on which the slowest package needs 0.02."""
HEAVY = ("torch", "numpy", "transformers", "pyarrow", "triton")


def processor_time_s(code: str) -> float:
    """The median of a few processes."""
    taken = []
    for _ in range(RUNS):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        user = after.children_user - before.children_user
        taken.append(user + after.children_system - before.children_system)
    return statistics.median(taken)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_at_once(package: str) -> None:
    """Within 0.15 s of processor time, without torch, numpy or another heavy library."""
    module = module_of(package)
    assert processor_time_s(f"import {module}") - processor_time_s("pass") <= MOST_S
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_imported_by_being_asked_for(package: str) -> None:
    """No name of the lazy list is missing where it is said to stand."""
    module = module_of(package)
    code = f"import {module} as m; print([name for name in m.__all__ if not hasattr(m, name)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
