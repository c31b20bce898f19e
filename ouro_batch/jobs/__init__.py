"""Batch jobs: read records, run them through the LLM facade, write records."""
