"""Slow, obvious oracles: element loops, full-vocabulary float64 losses, unpacked rows."""
