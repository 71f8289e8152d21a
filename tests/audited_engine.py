"""An engine process whose audit can be switched off and on: the real engine, told by signals.

``python -m tests.audited_engine`` takes the arguments of ``kvasir_node.engine``. `OFF` takes the audit away
from the dispatcher and the referee from its thread, rows that wait go on waiting; `ON` gives both back.
Everything else is what it is in service, so that one process can be measured both ways.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, ClassVar, Final

from kvasir_node.backbone import engine as backbone_engine
from kvasir_node.backbone.dispatcher import Dispatcher
from kvasir_node.engine.process import main

ON: Final = signal.SIGUSR1
OFF: Final = signal.SIGUSR2


class SwitchedDispatcher(Dispatcher):
    """Knows the audit that it was made with."""

    made: ClassVar[list[SwitchedDispatcher]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._of_service = self._audit
        self.made.append(self)

    def switch(self, number: int) -> None:
        """As the signal says."""
        audit = self._of_service
        assert audit is not None
        if (self._audit is not None) == (number == ON):
            return
        if number == OFF:
            audit._referee_lock.acquire()
        else:
            audit._referee_lock.release()
        self._audit = audit if number == ON else None


if __name__ == "__main__":
    vars(backbone_engine)["Dispatcher"] = SwitchedDispatcher
    for each in (ON, OFF):
        signal.signal(each, lambda number, _: SwitchedDispatcher.made[0].switch(number))
    sys.exit(main(sys.argv[1:]))
