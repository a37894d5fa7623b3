"""Start of a run on a cluster: batch files for Slurm and Kubernetes, and placement by Ray."""
