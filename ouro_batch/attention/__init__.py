"""Attention over paged, depth-aware keys and values."""
