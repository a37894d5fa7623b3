"""How do I start a training run on a Slurm cluster or on Kubernetes?

    python examples/launch/check.py

With `sbatch slurm.sbatch RUN.toml` or `kubectl apply -f kubernetes.yaml`: both files are in this
folder and start the same `ms_parallel train`. This script checks them without a cluster: shell
syntax, directives, the number of processes, and, if installed, `kubernetes-validate` and
`shellcheck`.
"""

import argparse
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ms_parallel import Layout

HERE = Path(__file__).parent
LAYOUT = Layout(data=4, tensor=8)
"""Layout in the run file of both: tensor ranks within a machine, data ranks across machines."""


def check_slurm(path: Path) -> None:
    """Raise an error if the shell or Slurm would reject a batch script."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)
    lines = path.read_text().splitlines()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", "\n".join(lines), re.MULTILINE))
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    misplaced = [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    assert not misplaced, f"Slurm ignores directives after the first command: {misplaced}"
    processes = int(directives["nodes"]) * int(directives["gpus-per-node"])
    assert processes == LAYOUT.world_size, f"{processes} accelerators for {LAYOUT}"
    assert directives["ntasks-per-node"] == "1", "torchrun starts the processes of a node"
    print(f"{path.name}: {len(directives)} directives, {processes} processes")


def check_kubernetes(path: Path) -> None:
    """Raise an error if an API server would reject a manifest."""
    import yaml

    documents: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    if find_spec("kubernetes_validate"):
        import kubernetes_validate

        for document in documents:
            version = kubernetes_validate.validate(document, "1.30", strict=True)
            print(f"{path.name}: {document['kind']} is valid for Kubernetes {version}")
    service, job = documents
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(part.lstrip("-").split("=") for part in container["command"] if "=" in part)
    accelerators = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(flags["nproc-per-node"]) == accelerators
    assert int(flags["nnodes"]) * accelerators == LAYOUT.world_size
    master = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert flags["rdzv-endpoint"].split(":")[0] == master, (
        "must be the first pod, by the service's name"
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    print(f"{path.name}: {LAYOUT.world_size} processes meet at {flags['rdzv-endpoint']}")


def main(arguments: list[str] | None = None) -> None:
    """Check both files."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    check_slurm(HERE / "slurm.sbatch")
    check_kubernetes(HERE / "kubernetes.yaml")


if __name__ == "__main__":
    main()
