"""Kubernetes manifests: an indexed Job whose first pod hosts the rendezvous, and its Service."""

from ms_parallel.launchers.job import ClusterJob

TEMPLATE = """\
# {nodes} pods with {devices} processes each. Start with: kubectl apply -f FILE
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None # gives the pods the names {name}-0.{name}, {name}-1.{name}, ...
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: {backoff}
  podFailurePolicy:
    rules:
      - action: Ignore # a preempted or evicted pod is replaced and does not count as a failure
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {grace_s} # SIGTERM makes the trainer write a checkpoint
      containers:
        - name: train
          image: {image}
          command:
            - torchrun
            - --nnodes={nodes}
            - --nproc-per-node={devices}
            - --rdzv-backend=c10d
            - --rdzv-id={name}
            - --rdzv-endpoint={name}-0.{name}:29400
            - --max-restarts=1000 # a replaced pod restarts the others from the checkpoint
            - -m
{module}
            - {run_file}
          env:
            - name: OMP_NUM_THREADS
              value: "{threads}"
            - name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT # torchrun's default of 30 s would be too short
              value: "{grace_s}"
          resources:
            limits:
              {resource}: {devices}
              cpu: "{cpus}"
          volumeMounts:
            - name: data
              mountPath: /data
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: data
          persistentVolumeClaim:
            claimName: {claim}
        - name: shared-memory
          emptyDir:
            medium: Memory
"""


def kubernetes_manifests(
    job: ClusterJob, *, image: str, claim: str, resource: str = "nvidia.com/gpu"
) -> str:
    """Return the Service and the Job, as YAML for `kubectl apply`.

    Args:
        job: the run.
        image: container image with the packages.
        claim: persistent volume claim, mounted at /data, for shards and checkpoints.
        resource: resource name of a device, such as `huawei.com/Ascend910`.
    """
    return TEMPLATE.format(
        name=job.name,
        nodes=job.nodes,
        devices=job.devices,
        backoff=3 * job.nodes,
        grace_s=job.grace_s,
        threads=job.threads,
        cpus=job.cpus,
        module="\n".join(f"            - {word}" for word in job.module.split()),
        run_file=job.run_file,
        image=image,
        claim=claim,
        resource=resource,
    )
