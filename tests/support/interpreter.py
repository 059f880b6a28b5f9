"""Triton's interpreter, faster: call this before a kernel runs, where TRITON_INTERPRET is 1."""

from __future__ import annotations

from typing import Any


def patch_once() -> None:
    """At each call of a device function the interpreter looks through Triton's language for what it has to replace,
    which a kernel has done before it calls one: that took half of a kernel's time.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        return
    own, tl, languages = interpreter._patch_lang, interpreter.tl, {}

    def patch_lang(function: Any) -> Any:
        if function not in languages:
            languages[function] = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        replaced = languages[function] and not any(tl.core.is_builtin(each.load) for each in languages[function])
        return interpreter._LangPatchScope() if replaced else own(function)

    interpreter._patch_lang = patch_lang
