"""Pushes a trained model to the Hugging Face hub. One that fails leaves the model, and says how to repeat it.

The hub's client has no timeout. So a silent request counts as failed, and a push has a deadline, by its bytes.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...base.errors import in_a_line

ASK_S = 20.0  # for the hub to say whose token it is
SILENT_S = 120.0  # of one request
PAUSES_S = (1.0, 5.0)  # before the next tries; the client itself tries most requests several times
_PUSH_S, _BYTES_PER_S = 600.0, 1e6  # a push that takes longer is given up


def require_hub(repo_id: str) -> None:
    """Raises OSError and ValueError, with the remedy, if the hub would refuse a push with the user's token."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    try:
        user = _tried(HfApi().whoami, ASK_S)
    except Exception as error:
        remedy = "run `hf auth login` or set HF_TOKEN; or leave --push-to-hub out, and run `hf upload` afterwards"
        raise OSError(
            f"--push-to-hub is {repo_id}, and no token is known to be valid ({in_a_line(error)}): {remedy}"
        ) from error
    owner, names = repo_id.rpartition("/")[0], [user["name"], *(each["name"] for each in user.get("orgs", ()))]
    if owner and owner not in names:
        raise ValueError(
            f"--push-to-hub is {repo_id}, and the token is of {' and '.join(names)}: give one of these as owner"
        )
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"--push-to-hub is {repo_id}, and the token may only read: set HF_TOKEN to one that may write")


def push_folder(folder: Path, repo_id: str, *, private: bool) -> str:
    """Adds the files of `folder` to a model on the hub, which is created if it is not there. Returns its address.

    Raises OSError with the command that repeats it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import get_session

    def push() -> str:
        get_session().timeout = SILENT_S
        repo = HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
        HfApi().upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Trained by odc-triton")
        return str(repo)

    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    try:
        address = _tried(push, _PUSH_S + size / _BYTES_PER_S)
    except Exception as error:
        again = shlex.join(["hf", "upload", repo_id, str(folder), ".", *["--private"] * private])
        raise OSError(f"the model is in {folder}, but not pushed ({in_a_line(error)}); to push it: {again}") from error
    print(f"{folder} is pushed to {address}", flush=True)
    return address


def _tried(call: Callable[[], Any], within_s: float) -> Any:
    """`call()`, again if the hub is busy, in a thread that is left alone after `within_s`. Raises its last error."""
    ends: list[Any] = []

    def work() -> None:
        for pause_s in (*PAUSES_S, None):
            try:
                ends[:] = [call(), None]
                return
            except Exception as error:
                # The client's RuntimeError has only the name of the file that was not uploaded.
                ends[:] = [None, cause := error.__cause__ or error if type(error) is RuntimeError else error]
                status = getattr(getattr(cause, "response", None), "status_code", None)
                is_busy = (
                    type(cause).__module__.startswith("httpx") if status is None else status >= 500 or status == 429
                )
                if not is_busy or pause_s is None:
                    return
                time.sleep(pause_s)

    thread = threading.Thread(target=work, name="odc-hub", daemon=True)
    thread.start()
    thread.join(within_s)
    made, error = (None, TimeoutError(f"no end within {within_s:,.0f} s")) if thread.is_alive() else ends
    if error is not None:
        raise error
    return made
