"""Every operator on a device without a dedicated backend, where the reference runs.

A tensor on the wrong device raises (see `tests/rig/` in the repository root).
"""

from pathlib import Path

from ms_rig import run_on_rig

from ms_kernels.operators import CONTRACTS

RUNS = Path(__file__).with_name("device_runs.py")


def test_the_reference_is_correct_on_the_device() -> None:
    """Each operator's results and gradients; backends made for others say that they are."""
    (report,) = run_on_rig(1, RUNS, "run_check")
    assert report["wrong"] == []
    assert report["proved"] == sorted(CONTRACTS)
    assert report["backends"] == ["reference"]


def test_operators_on_the_device_match_the_cpu() -> None:
    """Called through the public functions, as a model does."""
    (matches,) = run_on_rig(1, RUNS, "compare_with_cpu")
    assert sorted(name for name, match in matches.items() if match) == sorted(CONTRACTS)
