"""Words that readers stumbled over, and what the field says instead. `found_in` reads plain text, without code."""

from __future__ import annotations

import re
from collections.abc import Iterator

WORDS = {
    r"pictures?": "image(s), figure(s), vision-language models",
    r"deal(?:t|ing)|dealt out": "assigned, distributed",
    r"even(?:s|ed)? out|even work": "balances, balanced work",
    r"whole (?:samples?|logits)|made whole": "unsplit samples, full logits, unsharded",
    r"pieces?": "segment(s) of a sample, chunk(s) or part(s) of anything else",
    r"relatives|famil(?:y|ies) of samples|trees? of samples": "prefix group, shared-prefix tree",
    r"branch(?:es|ed|ing)? off": "branches at token t",
    r"floors?": "earliest cut (of an image), level (of the code)",
    r"ranks? (?:that )?sleep(?:s|ing)?|sleeping ranks?": "simulated compute",
    r"the bound": "the lower bound (of time), the ideal balance",
    r"publications?": "weight update; to publish",
    r"what goes with what": "feature compatibility",
    r"without phases": "overlapped rollouts",
    r"from a teacher": "distillation",
    r"with many ranks": "scaling",
    r"the own|own (?:engine|loop|rank)": "the native engine, your loop, the local rank",
    r"anew": "re-measured, again",
    r"of it (?:waited|readable|is|are|was|were|for)": "of which",
    r"besides?": "in addition, next to",
    r"(?:taken|took) over": "migrated",
    r"(?<!per-)layer barriers?": "per-layer barrier",
    r"a core each|as many in each": "one core per rank, the same number in each",
    r"for people who": "(begin with what the page gives)",
}
_ALL = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line (from 1), the word found, and what to write, for each of `WORDS` in `text`."""
    for found in _ALL.finditer(text):
        instead = next(right for word, right in WORDS.items() if re.fullmatch(word, found[0], re.IGNORECASE))
        yield text.count("\n", 0, found.start()) + 1, found[0], instead
