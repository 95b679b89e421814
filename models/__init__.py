"""The frozen target, its head, and the drafters."""
