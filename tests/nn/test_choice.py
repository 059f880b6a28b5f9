"""How an operator is told to run: words, their precedence, the table, and the table that is shipped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_triton.nn.choice import (
    BACKENDS,
    STRATEGIES,
    TABLE,
    WGRADS,
    WORDS,
    Choice,
    Entry,
    choose,
    is_by_kernel,
    is_gathered,
    parse,
)

ALL = (*BACKENDS, *STRATEGIES, *WGRADS)
PLACE = {"shape": (64, 32), "tokens": 10, "device_type": "cuda"}


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODC_OPERATORS", raising=False)


def _choice(words: str) -> Choice:
    backend, strategy, wgrad = words.split("/")
    return Choice(backend=backend, strategy=strategy, wgrad=wgrad)


def _entry(operator: str, words: str, **where: object) -> Entry:
    return Entry(operator=operator, choice=_choice(words), **where)


@pytest.mark.parametrize("text", ["", ",", " , ", "auto", "auto,linear=auto"])
def test_nothing_said(text: str) -> None:
    assert not any(parse(text).values())
    assert choose("linear", given=text, **PLACE) == TABLE[0].choice


@given(st.sampled_from(BACKENDS), st.sampled_from(STRATEGIES), st.sampled_from(WGRADS), st.permutations([0, 1, 2]))
def test_words_in_any_order(backend: str, strategy: str, wgrad: str, order: list[int]) -> None:
    words = [backend, strategy, wgrad]
    text = " / ".join(words[index] for index in order)
    assert choose("linear", given=text, **PLACE) == _choice("/".join(words))
    assert choose("linear", given=f" linear = {text} ,", **PLACE) == _choice("/".join(words))


@given(st.lists(st.sampled_from(ALL), unique=True))
def test_what_an_operator_does_not_know_says_nothing_to_it(words: list[str]) -> None:
    one_of_each = all(len(set(words) & set(kind)) <= 1 for kind in (BACKENDS, STRATEGIES, WGRADS))
    if not one_of_each:
        with pytest.raises(ValueError, match="give one"):
            parse("/".join(words))
        return
    for operator, known in WORDS.items():
        found = choose(operator, given="/".join(words), **PLACE)
        own = choose(operator, **PLACE)
        for kind, got, was in zip((BACKENDS, STRATEGIES, WGRADS), _fields(found), _fields(own), strict=True):
            said = set(words) & set(kind) & known
            assert got == (said.pop() if said else was)


def _fields(found: Choice) -> tuple[str, str, str]:
    return found.backend, found.strategy, found.wgrad


def test_for_some_operators_only() -> None:
    text = "linear=triton/direct,embedding=eager"
    assert choose("linear", given=text, **PLACE) == _choice("triton/direct/split")
    assert choose("embedding", given=text, **PLACE) == _choice("eager/direct/fused")
    assert choose("qkv", given=text, **PLACE) == choose("qkv", **PLACE)
    assert choose("log_probs", given=text, **PLACE) == choose("log_probs", **PLACE)
    assert choose("linear", given="staged,linear=fused", **PLACE) == _choice("eager/staged/fused")
    assert choose("linear", given="staged,linear=direct", **PLACE).strategy == "direct"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "eagre",
            r"'eagre': 'eagre' is not known here; give 'auto' or some of eager, triton, gathered, direct, staged",
        ),
        ("Triton", "'Triton' is not known here"),
        ("triton/direct/fuse", r"'triton/direct/fuse': 'fuse' is not known"),
        ("triton//fused", "'' is not known"),
        ("linear=", "'' is not known"),
        ("gemm=triton", "there is no operator 'gemm'; there are linear, qkv, embedding, log_probs"),
        ("=triton", "there is no operator ''"),
        ("linear=qkv=eager", "there is no operator 'linear=qkv'"),
        ("eager/triton", "'eager/triton': of eager, triton give one"),
        ("linear=direct/staged", "of gathered, direct, staged give one"),
        ("split/eager/fused", "of split, fused give one"),
        ("qkv=staged", r"'qkv=staged': 'staged' is not known here; give 'auto' or some of eager, triton, gathered, d"),
        ("log_probs=split", "'split' is not known here; give 'auto' or some of eager, triton, direct, fused"),
        ("linear=eager,embedding=triton/staged", "'embedding=triton/staged': 'staged' is not known"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)
    for operator in WORDS:
        with pytest.raises(ValueError, match=words):
            choose(operator, given=text, **PLACE)
        with pytest.raises(ValueError, match=words):
            is_gathered(operator, given=text, shape=(2, 2), device_type="cuda")
    monkeypatch.setenv("ODC_OPERATORS", text)
    with pytest.raises(ValueError, match=words):
        choose("linear", **PLACE)


@given(*[st.tuples(*[st.sampled_from(["", *kind]) for kind in (BACKENDS, STRATEGIES, WGRADS)]) for _ in range(2)])
def test_argument_over_variable_over_table(argument: tuple, variable: tuple) -> None:
    own = ("eager", "gathered", "split")
    want = [a or v or t for a, v, t in zip(argument, variable, own, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODC_OPERATORS", "/".join(filter(None, variable)))
        given_words = "/".join(filter(None, argument))
        table = (_entry("linear", "/".join(own)),)
        assert choose("linear", given=given_words, table=table, **PLACE) == _choice("/".join(want))
        got = is_gathered("linear", given=given_words, table=table, shape=(4, 4), device_type="cuda")
        assert got == (want[1] == "gathered")
        got = is_by_kernel("linear", given=given_words, table=table, shape=(4, 4), device_type="cuda")
        assert got == (want[0] == "triton")


@pytest.mark.parametrize(("operator", "device_type"), [*itertools.product(WORDS, ["cpu", "cuda"])])
def test_the_shipped_table(operator: str, device_type: str) -> None:
    """Nothing has been measured to be faster than the library's products."""
    is_product = operator in ("linear", "qkv")
    want = "eager/gathered/split" if is_product else f"{'triton' if device_type == 'cuda' else 'eager'}/direct/fused"
    for tokens in (0, 1, 10**7):
        assert choose(operator, shape=(64, 32), tokens=tokens, device_type=device_type) == _choice(want)
    assert is_gathered(operator, shape=(64, 32), device_type=device_type) == is_product
    assert is_by_kernel(operator, shape=(64, 32), device_type=device_type) == want.startswith("triton")


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    place = {"shape": (7919, 1), "device_type": "cpu"}  # of no other test: what was found once is kept
    remedy = "linear was given triton.*set TRITON_INTERPRET=1 before triton is imported, or give 'eager'"
    for ask in (lambda **given: choose(tokens=1, **given), is_gathered, is_by_kernel):
        with pytest.raises(ValueError, match=remedy):
            ask(operator="linear", given="triton", **place)
    assert choose("qkv", tokens=1, given="linear=triton", **place).backend == "eager"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("linear", tokens=1, given="triton", **place).backend == "triton"


def test_roles_are_names_of_their_operators_too() -> None:
    assert parse("head=eager,attention=triton/direct") == parse("log_probs=eager,qkv=triton/direct")
