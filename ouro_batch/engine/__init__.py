"""Request life cycle: which request runs, which blocks it owns."""
