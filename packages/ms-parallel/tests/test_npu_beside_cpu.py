"""A CPU process and one on `npu:0` train one model, with torch_npu's wheel on the null runtime.

The runtime computes on the CPU according to CANN's documentation (see `tests/ascend/null_runtime`
of ms-kernels). `nox -s ascend` installs torch_npu and runs this test; otherwise it is skipped.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed"
)


def free_port() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def run(folder: Path, devices: dict[str, str], layout: str, **options: Any) -> list[dict[str, Any]]:
    """Results of two processes; those with an NPU start the null runtime."""
    folder.mkdir()
    port, started = free_port(), []
    path = os.pathsep.join([str(HERE), *(part for part in sys.path if part)])
    for rank in range(2):
        npu = any(str(rank) in ranks for name, ranks in devices.items() if name != "cpu")
        arguments = {"npu": npu, "devices": devices, "layout": layout, **options}
        variables = {
            **os.environ,
            "PYTHONPATH": path,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = [str(HERE / "npu_process.py"), json.dumps(arguments), str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen([sys.executable, *words], env=variables, stdout=log, stderr=log)
            )
    try:
        codes = [process.wait(timeout=300) for process in started]
        logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(2)]
        assert codes == [0, 0], "\n".join(logs)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("layout", "options"), [("data=2", {}), ("pipeline=2", {"microbatch_size": 1})]
)
def test_a_cpu_and_an_npu_train_one_model(
    tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """Losses and weights equal two CPU processes', and weights stay on their device."""
    cpus = run(tmp_path / "cpus", {"cpu": "0-1"}, layout, **options)
    mixed = run(tmp_path / "mixed", {"cpu": "0", "npu:0": "1"}, layout, **options)
    assert [rank["weight_devices"] for rank in mixed] == [["cpu"], ["npu:0"]]
    for cpu_rank, rank in zip(cpus, mixed, strict=True):
        assert rank["losses"] == pytest.approx(cpu_rank["losses"], rel=TOLERANCE)
        for name, values in cpu_rank["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=TOLERANCE), name
