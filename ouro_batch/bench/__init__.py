"""Measures speed: named workloads on one model, beside what the machine could do at best."""
