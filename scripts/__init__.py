"""One entry for each command."""
