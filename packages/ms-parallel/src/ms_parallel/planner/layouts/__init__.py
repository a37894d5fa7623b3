"""Layouts of a run on a cluster: all that there are, what each holds and takes, and the best."""
