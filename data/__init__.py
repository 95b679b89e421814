"""Conversations, documents, packed rows, and the cache of target states."""
