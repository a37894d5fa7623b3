"""Files that start a run on a cluster, and placement by Ray."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import events, losses, train, wait_for, write_run

from ms_parallel.cli import main
from ms_parallel.launchers.job import ClusterJob
from ms_parallel.launchers.kubernetes import kubernetes_manifests
from ms_parallel.launchers.slurm import slurm_script

JOB = ClusterJob(run_file="/data/run.toml", nodes=4, devices=8)
STUBS = {
    # The step runs until `scancel` has been called. A signalled torchrun fails in any case.
    "srun": 'printf "%s\\n" "$@" > args; while [ ! -f stopped ]; do sleep 0.02; done;'
    ' [ ! -f finish ] || touch "$MS_FINISHED_FOLDER/finished"; exit 9',
    "scancel": 'echo "$@" > stopped',
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" > requeued; fi',
}


def start_script(folder: Path) -> "subprocess.Popen[str]":
    """Start the batch script with stand-ins for Slurm's commands."""
    (folder / "bin").mkdir()
    for name, body in STUBS.items():
        stub = folder / "bin" / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    (folder / "run.sbatch").write_text(slurm_script(JOB))
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    return subprocess.Popen(["bash", "run.sbatch"], cwd=folder, env=env, text=True)


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_batch_script_stops_the_step_and_requeues_before_the_time_limit(
    tmp_path: Path, number: signal.Signals, requeues: bool
) -> None:
    """SIGUSR1 comes before the time limit; SIGTERM is a preemption, which Slurm itself requeues."""
    script = start_script(tmp_path)
    wait_for((tmp_path / "args").exists, script)
    script.send_signal(number)
    assert script.wait(timeout=30) == 9
    assert (tmp_path / "stopped").read_text() == "--signal=TERM 77.0\n"
    assert (tmp_path / "requeued").exists() == requeues
    if requeues:
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    arguments = (tmp_path / "args").read_text().split()
    assert "--rdzv-endpoint=node7:29400" in arguments
    assert arguments[-4:] == ["-m", "ms_parallel", "train", "/data/run.toml"]


def test_a_run_that_finishes_after_the_signal_is_not_requeued(tmp_path: Path) -> None:
    """Its ranks leave a mark, as torchrun fails after a signal even if they finished."""
    (tmp_path / "finish").touch()
    script = start_script(tmp_path)
    wait_for((tmp_path / "args").exists, script)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=30) == 9
    assert (tmp_path / "stopped").exists()
    assert not (tmp_path / "requeued").exists()


def test_names_and_counts_in_the_manifests_are_consistent() -> None:
    """Pods, processes, and the rendezvous in the Service; also other modules and devices."""
    yaml = pytest.importorskip("yaml")
    job = ClusterJob(run_file="/data/r.toml", nodes=3, devices=16, module="ms_align grpo", name="r")
    text = kubernetes_manifests(job, image="image:1", claim="c", resource="huawei.com/Ascend910")
    service, manifest = yaml.safe_load_all(text)
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert manifest["spec"]["parallelism"] == manifest["spec"]["completions"] == 3
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": 16, "cpu": "64"}
    assert "--rdzv-endpoint=r-0.r:29400" in container["command"]
    assert container["command"][-4:] == ["-m", "ms_align", "grpo", "/data/r.toml"]
    assert service["spec"]["selector"] == {"job-name": "r"}


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    """Validated against the schemas of the API server; unknown fields are errors."""
    yaml = pytest.importorskip("yaml")
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all(kubernetes_manifests(JOB, image="image:1", claim="c")):
        assert validate(document, version, strict=True) == version


def test_a_wrong_number_of_processes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout of the run file must fit; a path must need no quotes in the script."""
    run = write_run(tmp_path / "run.toml", tmp_path)
    run.write_text(run.read_text() + "[layout]\ndata = 2\ntensor = 2\n")
    command = ["launch", "slurm", str(run), "--nodes", "2", "--devices"]
    assert main([*command, "4"]) == 2
    assert "nodes x devices must be 4" in capsys.readouterr().err
    assert main([*command, "2", "--out", str(tmp_path / "run.sbatch")]) == 0
    assert (tmp_path / "run.sbatch").read_text().startswith("#!")
    assert main(["launch", "slurm", "a;b.toml", "--nodes", "2", "--devices", "2"]) == 2
    assert main(["launch", "kubernetes", "a.toml", "--nodes", "2", "--devices", "2"]) == 2
    assert "needs --image" in capsys.readouterr().err


@pytest.mark.slow
def test_slurm_accepts_the_script() -> None:
    """`sbatch --test-only` of the Slurm that is installed; four nodes must be configured."""
    if not shutil.which("sbatch"):
        pytest.skip("needs Slurm's sbatch")
    # The cluster of the test may have no accelerators.
    script = slurm_script(JOB).replace("#SBATCH --gpus-per-node=8\n", "")
    checked = subprocess.run(
        ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rank", "agent"])
def test_a_run_on_ray_resumes_after_a_lost_worker(shards: Path, tmp_path: Path, lost: str) -> None:
    """Two agents of one process; SIGKILL of a rank or of an agent's actor, then the same losses."""
    pytest.importorskip("ray")
    undisturbed = write_run(tmp_path / "undisturbed.toml", shards, steps=24)
    assert train(undisturbed, 2).returncode == 0
    run = write_run(tmp_path / "run.toml", shards, steps=24)
    options: dict[str, Any] = {"nodes": 2, "devices": 1, "cpus": 1, "resource": "none"}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "ms_parallel", "launch", "ray", str(run), *words, "--pack"]
    with (tmp_path / "ray.log").open("w") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, text=True)
    try:
        wait_for(lambda: len(events(run, "step")) > 4, driver)
        name = "ray::Agent" if lost == "agent" else "ms_parallel train"
        victims = [pid for pid in descendants(driver.pid) if name in command_of(pid)]
        if lost == "rank":
            victims = [pid for pid in victims if "torch.distributed.run" not in command_of(pid)]
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        assert driver.wait(timeout=300) == 0, (tmp_path / "ray.log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    assert len(events(run, "resume")) == 1
    assert losses(run) == losses(undisturbed)


def descendants(root: int) -> list[int]:
    """Processes that a process has started, at any depth, and those of its Ray cluster."""
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, listing.splitlines())}
    result: list[int] = []
    pending = [root]
    while pending:
        parent = pending.pop()
        children = [pid for pid, other in parents.items() if other == parent]
        result += children
        pending += children
    return result


def command_of(pid: int) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
