"""Questions that may never be answered: the client of a TCPStore whose host is stopped waits without a deadline."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Asker:
    """Asks one question after the other in a thread of its own, which ends when this is freed. On a busy machine a new
    thread for each would take many times longer to start than a store to answer.
    """

    def __init__(self, name: str) -> None:
        self._questions: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_answer_all, args=(self._questions,), name=name, daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def ask(self, question: Callable[[], Any]) -> Future:
        answer = Future()
        self._questions.put((answer, question))
        return answer


def _answer_all(questions: SimpleQueue) -> None:
    while (asked := questions.get()) is not None:
        answer, question = asked
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)
        del asked, answer, question  # which would keep who asked alive
