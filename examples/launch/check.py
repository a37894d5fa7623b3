"""How do I start a training run on a Slurm cluster or on Kubernetes?

    python examples/launch/check.py

By `sbatch slurm.sbatch RUN.toml`, or `kubectl apply -f kubernetes.yaml`: both files lie beside this
one and start the same `ms_parallel train`. This checks what can be checked without a cluster: the
shell's own parser, the directives, the arithmetic of processes, and what `kubernetes-validate` and
`shellcheck` say, where they are installed.
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
"""What the run file of both asks for: tensor ranks within a machine, data ranks across."""


def check_slurm(path: Path) -> None:
    """Refuse a batch script that the shell, or Slurm's directives, would refuse."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)
    lines = path.read_text().splitlines()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", "\n".join(lines), re.MULTILINE))
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    late = [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    assert not late, f"Slurm reads no directive below the first command: {late}"
    processes = int(directives["nodes"]) * int(directives["gpus-per-node"])
    assert processes == LAYOUT.world_size, f"{processes} accelerators for {LAYOUT}"
    assert directives["ntasks-per-node"] == "1", "torchrun starts a node's processes itself"
    print(f"{path.name}: {len(directives)} directives, {processes} processes")


def check_kubernetes(path: Path) -> None:
    """Refuse a manifest that an API server would refuse."""
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
    said = dict(part.lstrip("-").split("=") for part in container["command"] if "=" in part)
    accelerators = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(said["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(said["nproc-per-node"]) == accelerators
    assert int(said["nnodes"]) * accelerators == LAYOUT.world_size
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert said["rdzv-endpoint"].split(":")[0] == first, "the first pod, by the service's name"
    assert pod["subdomain"] == service["metadata"]["name"]
    print(f"{path.name}: {LAYOUT.world_size} processes meet at {said['rdzv-endpoint']}")


def main(arguments: list[str] | None = None) -> None:
    """Check both."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    check_slurm(HERE / "slurm.sbatch")
    check_kubernetes(HERE / "kubernetes.yaml")


if __name__ == "__main__":
    main()
