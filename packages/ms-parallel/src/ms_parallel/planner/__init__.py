"""Plans runs: schedules and layouts for a model, by measurement, prediction and search."""
