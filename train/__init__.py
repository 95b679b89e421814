"""Training: configuration, the loop, objectives and stages, checkpoints, metrics."""
