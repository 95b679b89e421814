"""Speculative decoding and its evaluation."""
