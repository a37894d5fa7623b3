"""`ms-parallel launch`: write a job script for Slurm or Kubernetes, or run a job on Ray."""

import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

from ms_parallel.entry import CommandParser, file_argument, path_argument
from ms_parallel.used_settings import UsedIf

HELP = "start a run on Slurm, Kubernetes or Ray"
EXAMPLE = "ms-parallel launch slurm RUN.toml --nodes 4 --devices 8 --out run.sbatch"


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments."""
    parser.used_if = (
        UsedIf("time", "with slurm", lambda options: options.scheduler == "slurm"),
        UsedIf("image claim", "with kubernetes", lambda options: options.scheduler == "kubernetes"),
        UsedIf("address max_restarts pack", "with ray", lambda options: options.scheduler == "ray"),
        UsedIf(
            "resource",
            "with kubernetes or ray",
            lambda options: options.scheduler in ("kubernetes", "ray"),
        ),
        UsedIf(
            "out grace_s name",
            "with slurm or kubernetes",
            lambda options: options.scheduler in ("slurm", "kubernetes"),
        ),
    )
    parser.add_argument("scheduler", choices=("slurm", "kubernetes", "ray"))
    parser.add_argument(
        "run_file",
        type=path_argument,
        metavar="RUN.toml",
        help="path of the run file on the machines",
    )
    parser.add_argument("--nodes", type=int, required=True, help="number of machines")
    parser.add_argument("--devices", type=int, required=True, help="processes per machine")
    parser.add_argument("--cpus", type=int, default=64, help="CPU cores per machine (default 64)")
    parser.add_argument("--name", default="ms-train", help="name of the job (default ms-train)")
    parser.add_argument(
        "--module",
        default="ms_parallel train",
        metavar="'MODULE COMMAND'",
        help="module and command to run, such as 'ms_align grpo' (default 'ms_parallel train')",
    )
    parser.add_argument("--time", default="24:00:00", help="Slurm: time limit (default 24:00:00)")
    parser.add_argument(
        "--grace-s",
        type=int,
        default=180,
        metavar="S",
        help="seconds for a checkpoint before the job is killed (default 180)",
    )
    parser.add_argument("--image", help="Kubernetes: container image")
    parser.add_argument("--claim", help="Kubernetes: persistent volume claim, mounted at /data")
    parser.add_argument(
        "--resource",
        help="resource of a device (nvidia.com/gpu in Kubernetes, GPU in Ray; none for CPUs)",
    )
    parser.add_argument("--address", help="Ray: address of the cluster (default: a local one)")
    parser.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="Ray: restarts (default 3)"
    )
    parser.add_argument(
        "--pack", action="store_true", help="Ray: allow several agents on one machine"
    )
    parser.add_argument("--out", type=file_argument, metavar="FILE", help="file to write")


def run(options: Namespace) -> int:
    """Write the job script, or run on Ray and return the run's exit code."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.launchers.job import ClusterJob, read_job_layout

    job = ClusterJob(
        run_file=str(options.run_file),
        nodes=options.nodes,
        devices=options.devices,
        name=options.name,
        module=options.module,
        time=options.time,
        cpus=options.cpus,
        grace_s=options.grace_s,
    )
    # The run file may exist only on the cluster; check its layout if it is here.
    path = Path(job.run_file)
    if job.module == "ms_parallel train" and path.is_file():
        layout = read_job_layout(path)
        if layout is not None:
            job.check_layout(layout)
    if options.scheduler == "ray":
        from ms_parallel.launchers.ray import launch_on_ray

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        return launch_on_ray(
            job,
            folder=os.getcwd(),
            address=options.address,
            resource=None if options.resource == "none" else options.resource or "GPU",
            max_restarts=options.max_restarts,
            spread=not options.pack,
        )
    if options.scheduler == "slurm":
        from ms_parallel.launchers.slurm import slurm_script

        text = slurm_script(job)
    else:
        from ms_parallel.launchers.kubernetes import kubernetes_manifests

        for name in ("image", "claim"):
            if not getattr(options, name):
                raise ConfigError(f"kubernetes needs --{name}; add it")
        resource = options.resource or "nvidia.com/gpu"
        text = kubernetes_manifests(
            job, image=options.image, claim=options.claim, resource=resource
        )
    if options.out is None:
        sys.stdout.write(text)
        return 0
    from ms_parallel.files.durable import write_file, writing

    with writing(Path(options.out)):
        write_file(Path(options.out), text.encode())
    commands = {"slurm": "sbatch", "kubernetes": "kubectl apply -f"}
    print(f"wrote {options.out}; start it with: {commands[options.scheduler]} {options.out}")
    return 0
