"""Where does the time of an unchanged PyTorch script go?

    python examples/profile/unchanged_script.py

`ms-profile run` starts a script unmodified (here examples/data/plain_loop.py), detects its steps,
traces some of them and records the others at low cost. The output shows the breakdown of each
step's time and the most expensive operators; `report.html` has the timeline, advice and details.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ms_profile import advise, analyse, operator_table, write_report

SCRIPT = Path(__file__).parents[1] / "data" / "plain_loop.py"


def main(arguments: list[str] | None = None) -> None:
    """Record the script, print a summary, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("unchanged-script"))
    parser.add_argument("--script", type=Path, default=SCRIPT, help="training script")
    options = parser.parse_args(arguments)
    results = options.folder / "profile_results"
    if not results.exists():
        command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(options.script)]
        command += ["--output-dir", str(results), "--metrics", "compute_time,data_time,idle"]
        if options.script == SCRIPT:
            command += ["--", "--steps", "40", "--folder", str(options.folder / "loop")]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    run = analyse(results)
    rank = run.ranks[0]
    print(f"{len(rank.breakdowns)} traced steps")
    for step in rank.breakdowns[:3]:
        parts = {name: f"{spent / 1e6:.1f} ms" for name, spent in step.phases_ns.items() if spent}
        print(f"step {step.step.number}: {parts}")
    for operator in operator_table(rank.trace)[:5]:
        print(f"{operator.self_ns / 1e6:8.1f} ms in {operator.calls:4} calls of {operator.name}")
    for finding in advise(run):
        print(f"advice: {finding.title}; gains up to {finding.gain_share:.0%}")
    write_report(run, options.folder / "report.html", title="The plain loop")
    print(f"report: {options.folder / 'report.html'}")


if __name__ == "__main__":
    main()
