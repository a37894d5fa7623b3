"""Every operator on a device that no backend is made for: the reference runs there.

A tensor on the wrong device raises (see `tests/rig/` at the repository's top).
"""

from pathlib import Path

from ms_rig import run_on_rig

from ms_kernels.operators import CONTRACTS

RUNS = Path(__file__).with_name("device_runs.py")


def test_the_reference_is_proved_on_the_device() -> None:
    """Each operator's results and gradients; backends made for others say that they are."""
    (found,) = run_on_rig(1, RUNS, "checked")
    assert found["wrong"] == []
    assert found["proved"] == sorted(CONTRACTS)
    assert found["backends"] == ["reference"]


def test_operators_give_on_the_device_what_they_give_on_the_cpu() -> None:
    """Called by their names, as a model calls them."""
    (found,) = run_on_rig(1, RUNS, "called")
    assert sorted(name for name, same in found.items() if same) == sorted(CONTRACTS)
