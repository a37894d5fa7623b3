"""Make the helper modules in this folder importable by name."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("shared_source") / "tests")]
