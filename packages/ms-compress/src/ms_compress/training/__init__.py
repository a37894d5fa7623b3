"""Training after compression: loop, settings, checkpoint and distillation losses."""
