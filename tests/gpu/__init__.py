"""The engine on a GPU; skipped with a reason where there is none."""
