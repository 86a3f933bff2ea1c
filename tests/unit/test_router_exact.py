"""The router's choice against rational arithmetic: whatever binary32 rounds, the set is the true one."""

from __future__ import annotations

import ctypes as ct
from fractions import Fraction

import engine_build as eb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HARNESS = r"""
#include <string.h>
#include "router/router.h"
#include "kernels/kernels.h"

/* Router logits by the engine's own product, then the choice. */
int t_route(uint32_t n_expert, uint32_t n_embd, uint32_t used, const float *w, const float *x,
            const uint8_t *exclude, int32_t *chosen, float *weight, float *logits, int *recomputed)
{
    static float norm[1024];
    struct cb_manifest m;
    struct cb_kernels k;
    const char *why = "";
    struct cb_route out;
    memset(&m, 0, sizeof m);
    m.n_expert = n_expert;
    m.n_embd = n_embd;
    m.n_used = used;
    if (cb_kernels_init(&k, "scalar", &why) != 0)
        return -9;
    for (uint32_t e = 0; e < n_expert; e++)
        logits[e] = k.dot(w + (size_t)e * n_embd, x, n_embd);
    cb_router_norms(norm, w, n_expert, n_embd);
    const struct cb_router r = {w, norm, exclude};
    int rc = cb_route(&m, &k, &r, logits, x, 0, 0.0f, chosen, weight, &out);
    *recomputed = rc == 0 && out.recomputed;
    return rc;
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ct.CDLL:
    source = tmp_path_factory.mktemp("router") / "harness.c"
    source.write_text(HARNESS)
    return eb.library(str(source), "router/router.c", "core/err.c", *eb.KERNEL_UNITS)


def route(
    lib: ct.CDLL, w: np.ndarray, x: np.ndarray, used: int, exclude: np.ndarray | None = None
) -> tuple[int, list[int], bool]:
    """cb_route's answer, experts in rank order, whether the certificate failed. w [E, d], x [d]."""
    n_expert, n_embd = w.shape
    w, x = np.ascontiguousarray(w, np.float32), np.ascontiguousarray(x, np.float32)
    chosen, weight = np.full(used + 1, -1, np.int32), np.zeros(used + 1, np.float32)
    logits, flag = np.zeros(n_expert, np.float32), ct.c_int()
    skip = None if exclude is None else exclude.ctypes.data_as(ct.c_void_p)
    rc = lib.t_route(
        n_expert, n_embd, used, w.ctypes.data_as(ct.c_void_p), x.ctypes.data_as(ct.c_void_p), skip,
        chosen.ctypes.data_as(ct.c_void_p), weight.ctypes.data_as(ct.c_void_p),
        logits.ctypes.data_as(ct.c_void_p), ct.byref(flag),
    )  # fmt: skip
    return rc, chosen[:used].tolist(), bool(flag.value)


def true_set(w: np.ndarray, x: np.ndarray, used: int, exclude: np.ndarray | None = None) -> set[int]:
    """The `used` largest of w·x in real arithmetic, ties to the lower index."""
    xs = [Fraction(float(v)) for v in x]
    value = [sum((Fraction(float(a)) * b for a, b in zip(row, xs, strict=True)), Fraction(0)) for row in w]
    left = [i for i in range(len(value)) if exclude is None or not exclude[i]]
    return set(sorted(left, key=lambda i: (-value[i], i))[:used])


def check(lib: ct.CDLL, w: np.ndarray, x: np.ndarray, used: int, exclude: np.ndarray | None = None) -> bool:
    rc, chosen, recomputed = route(lib, w, x, used, exclude)
    assert rc == 0
    assert set(chosen) == true_set(w.astype(np.float32), x.astype(np.float32), used, exclude)
    assert len(set(chosen)) == used
    return recomputed


def ulps(rng: np.random.Generator, base: np.ndarray, rows: int, flips: int) -> np.ndarray:
    """`rows` copies of a row with a few weights moved by one unit in the last place."""
    w = np.repeat(base[None, :], rows, 0).astype(np.float32)
    for r in range(rows):
        for at in rng.integers(0, base.size, flips):
            w[r, at] = np.nextafter(w[r, at], np.float32(np.inf if rng.random() < 0.5 else -np.inf))
    return w


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), d=st.sampled_from([1, 7, 32, 33, 64, 257]), n=st.integers(2, 24),
    scale=st.sampled_from([1.0, 1e-30, 1e-22, 1e-12, 1e12, 1e17]), data=st.data(),
)  # fmt: skip
def test_random_rows(lib: ct.CDLL, seed: int, d: int, n: int, scale: float, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, n))
    rng = np.random.default_rng(seed)
    check(lib, rng.standard_normal((n, d)), rng.standard_normal(d) * scale, used)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), d=st.sampled_from([32, 64, 129]), n=st.integers(3, 16),
    flips=st.integers(0, 3), scale=st.sampled_from([1.0, 1e-36, 1e-20, 1e16]),
    wscale=st.sampled_from([1.0, 1e-38, 1e-42, 1e20]), data=st.data(),
)  # fmt: skip
def test_rows_that_differ_in_the_last_place(
    lib: ct.CDLL, seed: int, d: int, n: int, flips: int, scale: float, wscale: float, data: st.DataObject
) -> None:
    used = data.draw(st.integers(1, n - 1))
    rng = np.random.default_rng(seed)
    w = ulps(rng, (rng.standard_normal(d) * wscale).astype(np.float32), n, flips)
    recomputed = check(lib, w, rng.standard_normal(d) * scale, used)
    assert recomputed or wscale == 1e-42  # else such a cut is never certain: a subnormal's ulp is large


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(3, 12), data=st.data())
def test_sums_that_cancel(lib: ct.CDLL, seed: int, n: int, data: st.DataObject) -> None:
    """Large terms of opposite sign: binary64 rounds the rest away, real arithmetic does not."""
    used = data.draw(st.integers(1, n - 1))
    rng = np.random.default_rng(seed)
    half = rng.standard_normal(32) * 2.0 ** rng.integers(-40, 40, 32)
    w = np.zeros((n, 65), np.float32)
    w[:, :32], w[:, 32:64] = half, -half[None, :]
    w[:, 64] = rng.integers(-3, 4, n) * 2.0**-100  # what decides
    x = np.ones(65, np.float32)
    order = rng.permutation(64)
    w[:, :64] = w[:, order]
    assert check(lib, w, x, used)


def test_binary64_alone_would_be_wrong(lib: ct.CDLL) -> None:
    w = np.zeros((3, 3), np.float32)
    w[:, 0], w[:, 1] = 2.0**60, -(2.0**60)
    w[0, 2], w[1, 2], w[2, 2] = -(2.0**-30), 2.0**-30, 0.0
    w = w[:, [0, 2, 1]]  # big, small, -big: the small one is lost when summed in order
    x = np.ones(3, np.float32)
    assert w[0].astype(np.float64).cumsum()[-1] == w[1].astype(np.float64).cumsum()[-1] == 0
    assert route(lib, w, x, 1)[1] == [1]
    assert set(route(lib, w, x, 2)[1]) == {1, 2}


@pytest.mark.parametrize("used", [1, 2, 5])
def test_exact_ties_go_to_the_lower_index(lib: ct.CDLL, used: int) -> None:
    rng = np.random.default_rng(4)
    w = np.repeat(rng.standard_normal((1, 64)), 6, 0)
    assert route(lib, w, rng.standard_normal(64), used)[1] == list(range(used))
    assert route(lib, np.zeros((6, 64)), np.zeros(64), used)[1] == list(range(used))


def test_a_clear_cut_is_certified_and_a_thousand_experts_fit(lib: ct.CDLL) -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((1024, 16)), rng.standard_normal(16)
    w[:8] += 10 * np.sign(x)
    assert not check(lib, w, x, 8)
    assert check(lib, np.repeat(w[:1], 1024, 0), x, 64)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_unhealthy_experts_are_passed_over(lib: ct.CDLL, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    exclude = (rng.random(10) < 0.4).astype(np.uint8)
    left = int(10 - exclude.sum())
    used = data.draw(st.integers(1, 10))
    w = ulps(rng, rng.standard_normal(33).astype(np.float32), 10, 2)
    if used > left:
        assert route(lib, w, rng.standard_normal(33), used, exclude)[0] == -2
    else:
        check(lib, w, rng.standard_normal(33), used, exclude)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number_is_an_error(lib: ct.CDLL, bad: float) -> None:
    w = np.ones((4, 8), np.float32)
    w[2, 3] = bad
    assert route(lib, w, np.ones(8, np.float32), 2)[0] == -1
