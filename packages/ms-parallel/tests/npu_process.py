"""One rank of a run on a CPU and an NPU, the null runtime's; `test_npu_beside_cpu` starts it."""

import json
import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "ms-kernels/tests/ascend"


def main() -> None:
    """Train as the first argument says, and write what was found where the second says."""
    arguments, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if arguments.pop("npu"):
        sys.path.insert(0, str(RUNTIME))
        import null_runtime

        null_runtime.start()
    from mixed_runs import weights

    out.write_text(json.dumps(weights(**arguments)))


if __name__ == "__main__":
    main()
