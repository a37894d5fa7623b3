"""A rank of a run on a CPU and an NPU with the null runtime, started by `test_npu_beside_cpu`."""

import json
import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "ms-kernels/tests/ascend"


def main() -> None:
    """Train with the settings of the first argument, and write the results to the second."""
    arguments, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if arguments.pop("npu"):
        sys.path.insert(0, str(RUNTIME))
        import null_runtime

        null_runtime.start()
    from mixed_runs import weights

    out.write_text(json.dumps(weights(**arguments)))


if __name__ == "__main__":
    main()
