"""Batch script for Slurm that writes a checkpoint before its time limit and requeues itself."""

from ms_parallel.launchers.job import ClusterJob

TEMPLATE = """\
#!/usr/bin/env bash
# {nodes} nodes with {devices} processes each, started by torchrun. Submit with: sbatch FILE
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --cpus-per-task={cpus}
#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --signal=B:USR1@{grace_s}
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
set -euo pipefail

# Not `head`, whose early end would fail the pipeline with SIGPIPE.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export OMP_NUM_THREADS={threads}
# By default, torchrun kills its ranks 30 s after SIGTERM, even in the middle of a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace_s}
# The ranks on this node leave the file `finished` here when the run is complete.
export MS_FINISHED_FOLDER=$(mktemp -d)
trap 'rm -rf "$MS_FINISHED_FOLDER"' EXIT
requeue=0

# On SIGTERM, the trainer writes a checkpoint and exits.
stop() {{
  scancel --signal=TERM "$SLURM_JOB_ID.0" || true
}}
# Before the time limit: requeue this job, which then resumes from its checkpoint.
trap 'requeue=1; stop' USR1
# On preemption, Slurm requeues the job itself because of --requeue.
trap stop TERM

srun --kill-on-bad-exit=1 torchrun \\
  --nnodes={nodes} \\
  --nproc-per-node={devices} \\
  --rdzv-backend=c10d \\
  --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
  --rdzv-endpoint="$head_node:29400" \\
  --max-restarts=3 \\
  -m {module} {run_file} &
step=$!

# A trap interrupts `wait`, so it is called until srun has ended; the last call returns its status.
while kill -0 "$step" 2>/dev/null; do
  wait "$step" || true
done
status=0
wait "$step" || status=$?
if [ "$requeue" = 1 ] && [ ! -e "$MS_FINISHED_FOLDER/finished" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def slurm_script(job: ClusterJob) -> str:
    """Return the batch script of a job, for `sbatch`."""
    return TEMPLATE.format(
        name=job.name,
        nodes=job.nodes,
        devices=job.devices,
        cpus=job.cpus,
        time=job.time,
        grace_s=job.grace_s,
        threads=job.threads,
        module=job.module,
        run_file=job.run_file,
    )
