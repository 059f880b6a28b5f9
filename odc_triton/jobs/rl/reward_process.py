"""The process in which a rank's reward functions run: its handle in the rank, and its own code.

They communicate over a socket pair. A message is its length and its content: pickled to the functions, JSON back,
because a reward may execute a model's output, so nothing from the process may be unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import islice
from numbers import Complex, Real
from typing import Any, Literal

from ...base.errors import TRACEBACK
from ..launcher.launch import die_with_parent, how_it_ended
from .named_rewards import NAMES, missing_columns, named_reward

_LENGTH = struct.Struct("!Q")
_END_S = 2.0  # for exit handlers of the functions' modules
_TRACE_LINES = 12
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_KEYWORDS = ("prompts", "completions", "completion_ids")
_NOT_LISTS = (str, bytes, bytearray, Mapping, Set)
_CODE = """
import sys
descriptor, parent, *sys.path[:] = sys.argv[1:]
from odc_triton.jobs.rl.reward_process import serve
serve(int(descriptor), int(parent))
"""


class ProcessEnded(Exception):
    """The process is gone; the text has its exit status."""


class RewardProcess:
    """A new process that imports the functions `names`, each a "module:function" or one of `NAMES`, which are made with
    `settings`, and calls them on request.

    It is another program with its own session: it shares no memory, lock or file with the rank, and Ctrl-C does not
    reach it. The kernel kills it when the thread that started it ends; the functions' child processes are killed with
    it. Its output goes to stderr. columns: of the data, and of the evaluation's, if they are known.

    Raises ValueError if a function can't be imported, or called with the columns, ProcessEnded, and TimeoutError after
    `timeout_s` seconds.
    """

    def __init__(
        self,
        names: list[str],
        columns: Sequence[list[str] | None] = (),
        *,
        timeout_s: float,
        settings: Mapping[str, float],
    ) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # The job's working directory last, which `python -m` has too.
                [sys.executable, "-u", "-c", _CODE, str(theirs.fileno()), str(os.getpid()), *sys.path, os.getcwd()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            wanted = json.dumps([names, columns or [None], settings]).encode()
            problem = self._ask(wanted, time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise
        if problem:
            self.close()
            raise ValueError(problem)

    def call(self, function: int, keywords: dict[str, Any], *, deadline: float) -> dict[str, Any]:
        """Calls one of the functions. Returns {"rewards": list}, of a number, None, or any other value as text for
        each sample; {"raised": error, "trace": its last lines}; or {"returned": the result as text} if it is no list.

        Raises ProcessEnded, and TimeoutError at `deadline`, a time of the monotonic clock. After these, and any other
        interruption, the handle is unusable: `kill` it.
        """
        return self._ask(pickle.dumps((function, keywords)), deadline)

    def _ask(self, message: bytes, deadline: float) -> Any:
        try:
            _send(self._channel, message, deadline)
            return json.loads(_receive(self._channel, deadline))
        except (EOFError, ConnectionError):
            try:
                raise ProcessEnded(how_it_ended(self._process.wait(_END_S))) from None
            except subprocess.TimeoutExpired:
                raise ProcessEnded("its process closed the socket to its rank") from None

    def close(self) -> None:
        """Ends the process, after its exit handlers, and the functions' child processes."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        """Kills the process and the functions' child processes."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _send(channel: socket.socket, message: bytes, deadline: float | None = None) -> None:
    for part in (_LENGTH.pack(len(message)), message):
        channel.settimeout(_left(deadline))
        channel.sendall(part)


def _receive(channel: socket.socket, deadline: float | None = None) -> bytes:
    """The next message. Raises EOFError at the end, TimeoutError at `deadline`."""

    def read(count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            channel.settimeout(_left(deadline))
            part = channel.recv(min(count - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    return read(_LENGTH.unpack(read(_LENGTH.size))[0])


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def serve(descriptor: int, parent_pid: int) -> None:
    """The main function of the process: imports the functions, then calls them until its rank closes the channel."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _start_reaper()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.set_inheritable(descriptor, False)  # not by the functions' child processes
    channel = socket.socket(fileno=descriptor)
    try:
        _serve(channel)
    except ConnectionError:  # its rank is gone
        return


def _serve(channel: socket.socket) -> None:
    functions: list[Callable] = []
    problem = None
    names, columns, settings = json.loads(_receive(channel))
    for name in names:
        if name in NAMES:
            found = None if columns[0] is None else missing_columns(name, columns[0])
            found = found or named_reward(name, **settings)
        else:
            each_found = [find_function("reward", name, of) for of in columns]
            found = next((each for each in each_found if isinstance(each, str)), each_found[0])
        if isinstance(found, str):
            problem = problem or found
        else:
            functions.append(found)
    _send(channel, json.dumps(problem).encode())
    # One for all calls, as clients keep connections in it. asyncio is half of what the process would import.
    loop = cache(lambda: importlib.import_module("asyncio").new_event_loop())
    while True:
        try:
            message = _receive(channel)
        except EOFError:
            return
        function, keywords = pickle.loads(message)
        _send(channel, json.dumps(_call(functions[function], keywords, loop)).encode())


def _start_reaper() -> None:
    """Starts a process that kills the functions' child processes once this one is gone, in any way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    functions_pid = os.getpid()
    if os.fork() == 0:
        die_with_parent(number=signal.SIGTERM)
        if os.getppid() == functions_pid:  # else it ended before that call
            signal.sigwait([signal.SIGTERM])
        os.killpg(functions_pid, signal.SIGKILL)  # by number: a session of its own, never the rank's


def find_function(kind: Literal["reward", "rollout"], name: str, columns: list[str] | None = None) -> Callable | str:
    """The function `name`, a "module:function", or the reason why there is none. `columns`: of the data, if known."""
    module_name, _, path = name.partition(":")
    try:
        found = module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            return f"{kind} {name}: importing {module_name} needs {error.name}, which is not installed: install it"
        return (
            f"{kind} {name}: there is no module {error.name}: "
            + (f"write {name.replace('.py:', ':').replace('/', '.')}, and " if ".py:" in name else "")
            + "start the job in the folder that has it, or add that folder to PYTHONPATH"
        )
    except BaseException as error:  # SystemExit too
        return f"{kind} {name}: importing {module_name} raised {type(error).__name__}: {error}\n{trace_of(error)}"
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        own = ", ".join(name for name in vars(module) if not name.startswith("_")) or "nothing"
        return f"{kind} {name}: {module.__file__} has no {path}: name one of its functions; it has {own}"
    if not callable(found):
        return f"{kind} {name}: {path} is {found!r:.60}, no function: name one of {module.__file__}"
    try:
        if kind == "reward":
            given, signature = dict.fromkeys([*_KEYWORDS, *(columns or ())]), inspect.signature(found)
            signature.bind_partial(**given) if columns is None else signature.bind(**given)
        else:
            inspect.signature(found).bind("prompts", "engine")
    except TypeError as error:
        if kind == "rollout":
            return f"rollout {name}: {path} can't be called with prompts and an engine ({error}): give it these two"
        return (
            f"{kind} {name}: {path} can't be called with the keywords {', '.join(given)} ({error}), which are all "
            f"that there are: name its parameters after these, and end its parameters with **columns"
        )
    except ValueError:  # written in C, without a signature
        pass
    return found


def _call(function: Callable, keywords: dict[str, Any], loop: Callable[[], Any]) -> dict[str, Any]:
    try:
        returned = function(**keywords)
        if inspect.isawaitable(returned):
            returned = loop().run_until_complete(returned)
        if not _is_list(returned):
            return {"returned": _short(returned)}
        rewards = islice(returned, len(keywords["prompts"]) + 1)  # a generator may have no end
        return {"rewards": [_plain(reward) for reward in rewards]}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}", "trace": trace_of(error)}


def _is_list(returned: Any) -> bool:
    """True for values in an order, one for each completion; not for a dict's keys, a set, a text or a table."""
    shape = getattr(returned, "shape", (0,))
    return isinstance(returned, Iterable) and not isinstance(returned, _NOT_LISTS) and len(shape) == 1


def _plain(reward: Any) -> float | str | None:
    if reward is None:
        return None
    if isinstance(reward, (str, bytes)) or (isinstance(reward, Complex) and not isinstance(reward, Real)):
        return _short(reward)
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _short(reward)
    return number if math.isfinite(number) else str(number)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.100}"


def trace_of(error: BaseException) -> str:
    """A traceback with the user's own frames only; a long one is cut to its last lines."""
    found = traceback.TracebackException.from_exception(error)
    _keep_own(found)
    lines = "".join(found.format()).removeprefix(TRACEBACK.strip()).strip("\n").splitlines()
    return "\n".join([TRACEBACK.strip(), *lines[-_TRACE_LINES:]])


def _keep_own(found: traceback.TracebackException | None) -> None:
    if found is not None:
        ours = (__file__, importlib.__file__)
        frames = [f for f in found.stack if f.filename not in ours and not f.filename.startswith("<frozen importlib")]
        own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
        found.stack = traceback.StackSummary.from_list(own or frames)
        _keep_own(found.__cause__)
        _keep_own(found.__context__)
