"""The command line with ``FakeLLM`` in place of the real one, as a program for subprocesses.

``KILL_AT=point:number`` in the environment has the process kill itself, as a power cut would, at
the number-th passing of a point: ``append`` (a record was appended), ``torn`` (half of it was),
``sync`` (before the part is synced), ``order`` (a record was put in order), ``rename`` (before
the statistics are there, and before OUT is), ``remove`` (before the part goes).
``GRACE_S``: seconds that SIGTERM leaves.
"""

import os
import signal
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import FakeLLM

module = types.ModuleType("ouro_batch.llm")
module.LLM = FakeLLM
sys.modules["ouro_batch.llm"] = module


def arm(point, number):
    from ouro_batch.jobs import part, writer

    passed = 0

    def passing():
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name):
        real = getattr(owner, name)

        def wrapped(*arguments, **options):
            passing()
            return real(*arguments, **options)

        setattr(owner, name, wrapped)

    if point == "append":
        real_append = part.PartFile.append

        def append(self, *arguments):
            real_append(self, *arguments)
            passing()

        part.PartFile.append = append
    elif point == "torn":
        real_write = part.PartFile._write

        def write(self, data):
            if passed == number - 1:
                os.write(self._file, data[: len(data) // 2])
            passing()
            real_write(self, data)

        part.PartFile._write = write
    elif point == "sync":
        part.SYNC_INTERVAL_S = 0.0
        before(part.PartFile, "sync")
    elif point == "order":
        before(part.PartFile, "_record_bytes")
    elif point == "rename":
        before(writer.os, "replace")
    elif point == "remove":
        before(part.PartFile, "remove")
    else:
        raise ValueError(point)


if __name__ == "__main__":
    if "KILL_AT" in os.environ:
        kind, _, count = os.environ["KILL_AT"].partition(":")
        arm(kind, int(count))
    if "GRACE_S" in os.environ:
        from ouro_batch.jobs import interrupt

        interrupt.GRACE_S = float(os.environ["GRACE_S"])
    from ouro_batch.cli import main

    main()
