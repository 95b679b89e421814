"""Hydra configuration groups, and the schema that types them."""
