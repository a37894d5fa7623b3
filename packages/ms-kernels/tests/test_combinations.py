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
    """Counted from the levels: each pair of levels of two factors stands in a row."""
    factors = factors_of(operator)
    covered = set().union(*map(pairs_of, covering_array(factors)))
    counts = [len(levels) for levels in factors.values()]
    assert len(covered) == sum(one * two for one, two in itertools.combinations(counts, 2))


def test_a_sample_of_all_pairs_holds():
    """Other rows every day; `combinations.py` runs them all."""
    seed = str(datetime.date.today().toordinal())
    command = [sys.executable, str(SCRIPT), "--sample", "16", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-3000:]}{done.stderr[-2000:]}"
