"""Tiles as data: the table, the candidates and the cost model, in plain arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from odc_kernels.tiles import (
    ARCHITECTURES,
    CHIPS,
    DEFAULTS,
    DIMENSIONS,
    SHARED_LIMIT_BYTES,
    WGRAD_FP32,
    Chip,
    LinearTile,
    ProductShape,
    WgradTile,
    candidates,
    chip_of,
    of_integers,
    predict,
    ranked,
    shared_bytes,
    tile_of,
)

H200 = CHIPS["H200 SXM"]


def test_it_imports_neither_torch_nor_triton() -> None:
    code = "import sys, odc_kernels.tiles; print({'torch', 'triton'} & set(sys.modules))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("operator", sorted(DIMENSIONS))
def test_candidates_fit(operator: str, element_bytes: int, arch: int) -> None:
    found = candidates(operator, element_bytes=element_bytes, arch=arch)
    assert len(found) > 5
    assert len(set(found)) == len(found)
    for tile in found:
        assert shared_bytes(operator, tile, element_bytes=element_bytes, arch=arch) <= SHARED_LIMIT_BYTES[arch]
        if arch == 90 and element_bytes == 2:
            assert getattr(tile, DIMENSIONS[operator][0]) >= 64


def test_exact_sums_halve_tiles_whose_integers_would_spill() -> None:
    def columns(arch: int, *, bulk: bool, k: int = 128) -> int:
        return of_integers(WgradTile(k=k), arch=arch, bulk=bulk).k

    assert [columns(arch, bulk=False) for arch in ARCHITECTURES] == [64, 64, 64, 64]
    assert [columns(arch, bulk=True) for arch in (90, 100, 120)] == [128, 64, 64]
    assert columns(90, bulk=True, k=256) == 128
    assert of_integers(WGRAD_FP32, arch=80, bulk=False) == WGRAD_FP32


@pytest.mark.parametrize("arch", [*ARCHITECTURES, 86, 89, 103, 121])
@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 65536])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_table_covers_all_and_fits(arch: int, tokens: int, element_bytes: int) -> None:
    for operator in {name for entry in DEFAULTS for name in entry.operators}:
        tile = tile_of(operator, element_bytes=element_bytes, arch=arch, tokens=tokens)
        if operator in DIMENSIONS and arch in ARCHITECTURES:
            used = shared_bytes(operator, tile, element_bytes=element_bytes, arch=arch)
            assert used <= SHARED_LIMIT_BYTES[arch], (operator, tile)


def test_the_table_goes_by_tokens_and_dtype() -> None:
    assert tile_of("linear", element_bytes=2, arch=90, tokens=64).t == 64
    assert tile_of("linear", element_bytes=2, arch=90, tokens=65).t == 128
    assert tile_of("linear", element_bytes=4, arch=90, tokens=65).t == 64
    assert tile_of("wgrad", element_bytes=4, arch=80, tokens=1) == WGRAD_FP32


@pytest.mark.parametrize(("operator", "element_bytes", "arch"), [("conv", 2, 90), ("linear", 8, 90), ("linear", 2, 75)])
def test_what_is_not_in_the_table_is_refused(operator: str, element_bytes: int, arch: int) -> None:
    with pytest.raises(ValueError, match=f"no default tile of {operator}.*there are tiles of .*linear.*sm_120"):
        tile_of(operator, element_bytes=element_bytes, arch=arch, tokens=1)


# One multiprocessor does 1000 operations a second and reads the L2 at once; memory and links move bytes 1 by 1.
TOY = Chip(
    arch=90,
    sms=4,
    matrix_flops_per_sm=1000.0,
    fp32_flops_per_sm=500.0,
    l2_bytes_s_per_sm=1e12,
    hbm_bytes_s=1e12,
    link_bytes_s=1e12,
    l2_bytes=10**9,
    launch_s=0.0,
)
TILE = LinearTile(t=4, n=5, k=10)


def test_compute_by_hand() -> None:
    # 2 blocks of tokens, 2 owners with 5 + 5 rows: 4 programs of 3 steps over k, one wave on 4 multiprocessors.
    problem = ProductShape(tokens=7, rows=10, columns=25, world=2)
    cost = predict("linear", TILE, problem, TOY)
    assert cost.waves == 1
    assert cost.flops == 4 * 3 * 2 * 4 * 5 * 10
    assert cost.seconds == pytest.approx(3 * 2 * 4 * 5 * 10 / 1000)
    # 9 + 1 rows make 3 blocks of 5: two waves.
    assert predict("linear", TILE, replace(problem, rows=11), TOY).waves == 2


def test_bytes_by_hand() -> None:
    problem = ProductShape(tokens=7, rows=10, columns=25, world=2)
    direct = predict("linear", TILE, problem, TOY)
    # 5 rows of 25 lie elsewhere, and both blocks of tokens read them; x and the own 5 rows are read, y is written.
    assert direct.link_bytes == 2 * 5 * 25 * 2
    assert direct.hbm_bytes == 2 * (7 * 25 + 5 * 25 + 7 * 10)
    staged = predict("linear_staged", TILE, problem, TOY)
    assert staged.link_bytes == 5 * 25 * 2
    assert staged.hbm_bytes == 2 * (7 * 25 + 10 * 25 + 7 * 10 + 5 * 25)
    dx = predict("linear_dx", TILE, problem, TOY)
    assert (dx.link_bytes, dx.hbm_bytes) == (2 * 5 * 25 * 2, direct.hbm_bytes)
    wgrad = predict("wgrad", WgradTile(n=5, k=10, t=4), problem, TOY)
    # Sums of 4 bytes: sent for the rows of others, read and written for the own.
    assert wgrad.link_bytes == 5 * 25 * 4
    assert wgrad.hbm_bytes == 2 * (7 * 10 + 7 * 25) + 8 * 5 * 25


def test_staged_wins_where_there_are_many_tokens() -> None:
    def seconds(operator: str, tokens: int) -> float:
        return ranked(operator, ProductShape(tokens=tokens, rows=14336, columns=4096, world=8), H200)[0][0]

    assert seconds("linear", 16) < seconds("linear_staged", 16)
    assert seconds("linear_staged", 8192) < seconds("linear", 8192)
    best, tile = ranked("wgrad", ProductShape(tokens=8192, rows=14336, columns=4096, world=8), H200)[0]
    assert tile.n * tile.k >= 128 * 128
    assert best > 2 * 8192 * 14336 * 4096 / 989e12


@pytest.mark.parametrize(
    ("name", "arch", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", 90, "H100 SXM"),
        ("NVIDIA H200", 90, "H200 SXM"),
        ("NVIDIA GH200 480GB", 90, "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100 SXM"),
        ("NVIDIA A30", 80, "A100 SXM"),
        ("NVIDIA L4", 89, None),
    ],
)
def test_chips_by_name(name: str, arch: int, chip: str | None) -> None:
    assert chip_of(name, arch) == CHIPS.get(chip)
