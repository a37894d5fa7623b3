"""Run a training script unchanged and record each rank's time."""
