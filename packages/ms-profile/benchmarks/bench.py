"""Run the package's benchmarks: cost of capture, and speed of analysis."""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    folder = Path(__file__).parent
    for script in (folder / "capture.py", folder / "analysis.py"):
        if script.exists():
            print(f"== {script.stem}", flush=True)
            subprocess.run([sys.executable, str(script)], check=True)


if __name__ == "__main__":
    main()
