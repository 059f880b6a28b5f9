"""A quick check of the Hugging Face hub: its own libraries retry for a minute before they fail."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request

_PROBLEM = "ODC_HUB_PROBLEM"
ANSWER_S = 5.0  # for its name to be resolved and an answer to come


def hub_problem() -> str | None:
    """The reason why the hub does not answer; its libraries are then set offline, in this process and its children.
    None if it answers, or if they were set offline by others or are not installed.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    if constants.HF_HUB_OFFLINE:
        return os.environ.get(_PROBLEM)
    answers: list[str | None] = []
    asking = threading.Thread(target=lambda: answers.append(_problem(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(ANSWER_S)  # resolving a name has no timeout of its own
    problem = answers[0] if answers else f"no answer within {ANSWER_S:g} s"
    if problem is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries imported later
    constants.HF_HUB_OFFLINE = True
    words = f"it is not in the hub's cache, and the hub at {constants.ENDPOINT} does not answer ({problem})"
    os.environ[_PROBLEM] = words  # why they are offline
    return words


def _problem(address: str) -> str | None:
    """The reason why `address` does not answer, through the proxies of the environment; None if it does."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, (ssl.SSLError, http.client.HTTPException)) else str(reason)
    return None
