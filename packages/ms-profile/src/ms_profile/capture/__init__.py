"""Capture: run a training script unchanged, and record where its time goes on every rank."""

from ms_profile.capture.plan import Place, Plan
from ms_profile.capture.run import launch, run_here
from ms_profile.metrics import METRICS, parse_metrics

__all__ = ["METRICS", "Place", "Plan", "launch", "parse_metrics", "run_here"]
