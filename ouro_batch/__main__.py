"""``python -m ouro_batch``: the same as the ``ouro-batch`` command."""

from ouro_batch.cli import main

main()
