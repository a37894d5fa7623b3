"""A sample of the covering array of options, arguments, dtypes, layouts and backends."""

import datetime
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra cuda is not installed")

SCRIPT = Path(__file__).parent / "combinations.py"
sys.path.insert(0, str(SCRIPT.parent))
from combinations import covering_array, factors_of, pairs_of  # noqa: E402
from ms_kernels.operators import OPERATORS  # noqa: E402


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_array_covers_every_pair(operator):
    """Every pair of levels of two factors occurs in some row."""
    factors = factors_of(operator)
    covered = set().union(*map(pairs_of, covering_array(factors)))
    counts = [len(levels) for levels in factors.values()]
    assert len(covered) == sum(a * b for a, b in itertools.combinations(counts, 2))


def test_a_sample_of_the_array_passes():
    """The sample changes daily; `combinations.py` runs all rows."""
    seed = str(datetime.date.today().toordinal())
    command = [sys.executable, str(SCRIPT), "--sample", "16", "--seed", seed]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, f"seed {seed}: {process.stdout[-3000:]}{process.stderr[-2000:]}"
