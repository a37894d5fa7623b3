"""Run a training script unchanged, and record where its time goes on every rank."""
