"""Executes what the scheduler chose: device state, loop steps, sampling."""
