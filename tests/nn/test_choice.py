"""How an operator is told to run: words, their precedence, the table, and the table that is shipped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_triton.nn.choice import (
    BACKENDS,
    SOURCES,
    TABLE,
    WGRADS,
    WORDS,
    Choice,
    Entry,
    choices,
    choose,
    parse,
)

ALL = (*BACKENDS, *SOURCES, *WGRADS)
PLACE = {"shape": (64, 32), "tokens": 10, "device_type": "cuda"}


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODC_OPERATORS", raising=False)


def _choice(words: str) -> Choice:
    backend, source, wgrad = words.split("/")
    return Choice(backend=backend, source=source, wgrad=wgrad)


def _entry(operator: str, words: str, **where: object) -> Entry:
    return Entry(operator=operator, choice=_choice(words), **where)


@pytest.mark.parametrize("text", ["", ",", " , ", "auto", "auto,linear=auto"])
def test_nothing_said(text: str) -> None:
    assert not any(parse(text).values())
    assert choose("linear", given=text, **PLACE) == TABLE[0].choice


@given(st.sampled_from(BACKENDS), st.sampled_from(SOURCES), st.sampled_from(WGRADS), st.permutations([0, 1, 2]))
def test_words_in_any_order(backend: str, source: str, wgrad: str, order: list[int]) -> None:
    words = [backend, source, wgrad]
    text = " / ".join(words[index] for index in order)
    assert choose("linear", given=text, **PLACE) == _choice("/".join(words))
    assert choose("linear", given=f" linear = {text} ,", **PLACE) == _choice("/".join(words))


@given(st.lists(st.sampled_from(ALL), unique=True))
def test_what_an_operator_does_not_know_says_nothing_to_it(words: list[str]) -> None:
    one_of_each = all(len(set(words) & set(kind)) <= 1 for kind in (BACKENDS, SOURCES, WGRADS))
    if not one_of_each:
        with pytest.raises(ValueError, match="give one"):
            parse("/".join(words))
        return
    for operator, known in WORDS.items():
        found = choose(operator, given="/".join(words), **PLACE)
        own = choose(operator, **PLACE)
        for kind, got, was in zip((BACKENDS, SOURCES, WGRADS), _fields(found), _fields(own), strict=True):
            said = set(words) & set(kind) & known
            assert got == (said.pop() if said else was)


def _fields(found: Choice) -> tuple[str, str, str]:
    return found.backend, found.source, found.wgrad


def test_for_some_operators_only() -> None:
    text = "linear=triton/direct,embedding=eager"
    assert choose("linear", given=text, **PLACE) == _choice("triton/direct/whole")
    assert choose("embedding", given=text, **PLACE) == _choice("eager/direct/fused")
    assert choose("qkv", given=text, **PLACE) == choose("qkv", **PLACE)
    assert choose("log_probs", given=text, **PLACE) == choose("log_probs", **PLACE)
    assert choose("linear", given="staged,linear=fused", **PLACE) == _choice("eager/staged/fused")
    assert choose("linear", given="staged,linear=direct", **PLACE).source == "direct"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "eagre",
            r"'eagre': 'eagre' is not known here; give 'auto' or some of eager, triton, gathered, direct, staged",
        ),
        ("triton/direct/fuse", r"'triton/direct/fuse': 'fuse' is not known"),
        ("gemm=triton", "there is no operator 'gemm'; there are linear, qkv, embedding, log_probs"),
        ("eager/triton", "'eager/triton': of eager, triton give one"),
        ("qkv=staged", r"'qkv=staged': 'staged' is not known here; give 'auto' or some of eager, triton, gathered, d"),
        ("log_probs=whole", "'whole' is not known here; give 'auto' or some of eager, triton, direct, fused"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)
    for operator in WORDS:
        with pytest.raises(ValueError, match=words):
            choose(operator, given=text, **PLACE)
        with pytest.raises(ValueError, match=words):
            choices(operator, given=text, shape=(2, 2), device_type="cuda")
    monkeypatch.setenv("ODC_OPERATORS", text)
    with pytest.raises(ValueError, match=words):
        choose("linear", **PLACE)


@given(*[st.tuples(*[st.sampled_from(["", *kind]) for kind in (BACKENDS, SOURCES, WGRADS)]) for _ in range(2)])
def test_argument_over_variable_over_table(argument: tuple, variable: tuple) -> None:
    own = ("eager", "gathered", "whole")
    want = [a or v or t for a, v, t in zip(argument, variable, own, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODC_OPERATORS", "/".join(filter(None, variable)))
        given_words = "/".join(filter(None, argument))
        table = (_entry("linear", "/".join(own)),)
        assert choose("linear", given=given_words, table=table, **PLACE) == _choice("/".join(want))
        (got,) = choices("linear", given=given_words, table=table, shape=(4, 4), device_type="cuda")
        assert (got.is_gathered, got.is_by_kernel) == (want[1] == "gathered", want[0] == "triton")
        assert got.reads_copies == (want[1] == "staged" or want[0] == "triton")


OWN = _entry("linear", "triton/direct/fused", device_type="cuda", shape=(8, 4), tokens=16)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["linear", "qkv"]),
            st.sampled_from([None, "cuda", "cpu"]),
            st.sampled_from([None, (2, 3), (3, 2)]),
            st.sampled_from([None, 0, 5, 50]),
            st.sampled_from(["/".join(words) for words in itertools.product(["eager"], SOURCES, WGRADS)]),
        ),
        max_size=8,
    ),
    st.sampled_from([(2, 3), (3, 2)]),
    st.integers(0, 60),
)
def test_lines_by_hand(lines: list[tuple], shape: tuple[int, ...], tokens: int) -> None:
    drawn = (_entry(op, words, device_type=where, shape=of, tokens=n) for op, where, of, n, words in lines)
    table = (_entry("embedding", "eager/direct/fused"), *drawn)  # never empty, which is the shipped one
    holding = [
        (words, n)
        for op, where, of, n, words in lines
        if op == "linear" and where in (None, "cuda") and of in (None, shape)
    ]
    fitting = [words for words, n in holding if n is None or tokens <= n]
    place = {"shape": shape, "device_type": "cuda", "table": table}
    if fitting:
        assert choose("linear", tokens=tokens, **place) == _choice(fitting[0])
        # A list, as `torch.Size` or a config may give it, is the same shape.
        assert choose("linear", tokens=tokens, **place | {"shape": list(shape)}) == _choice(fitting[0])
    else:
        with pytest.raises(LookupError):
            choose("linear", tokens=tokens, **place)
    if holding:
        reached = holding[: next((at for at, (_, n) in enumerate(holding, 1) if n is None), None)]
        assert choices("linear", **place) == [_choice(words) for words, _ in reached]


@pytest.mark.parametrize(("operator", "device_type"), [*itertools.product(WORDS, ["cpu", "cuda"])])
def test_the_shipped_table(operator: str, device_type: str) -> None:
    """Nothing has been measured to be faster than the library's products."""
    is_product = operator in ("linear", "qkv") or (operator, device_type) == ("experts", "cuda")
    want = "eager/gathered/whole" if is_product else f"{'triton' if device_type == 'cuda' else 'eager'}/direct/fused"
    for tokens in (0, 1, 10**7):
        assert choose(operator, shape=(64, 32), tokens=tokens, device_type=device_type) == _choice(want)
    assert choices(operator, shape=(64, 32), device_type=device_type) == [_choice(want)]


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    place = {"shape": (7919, 1), "device_type": "cpu"}  # of no other test: what was found once is kept
    remedy = "linear was given triton.*set TRITON_INTERPRET=1 before triton is imported, or give 'eager'"
    for ask in (lambda **given: choose(tokens=1, **given), choices):
        with pytest.raises(ValueError, match=remedy):
            ask(operator="linear", given="triton", **place)
    assert choose("qkv", tokens=1, given="linear=triton", **place).backend == "eager"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("linear", tokens=1, given="triton", **place).backend == "triton"


def test_roles_are_names_of_their_operators_too() -> None:
    assert parse("head=eager,attention=triton/direct") == parse("log_probs=eager,qkv=triton/direct")
