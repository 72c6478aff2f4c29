"""Noise of the Triton backend: Philox words by token, and E = -log(1 - t) of them.

The token with the least E / w is drawn. `bounds_of` and `log2_bound` give a lower bound of the scores of a group of
tokens for one instruction a token and without a logarithm, so that scores are computed for few groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, by):
    """Return the high and low word of a product of 32-bit words, by one wide multiplication (`tl.philox` makes two)."""
    product = a.to(tl.uint64) * by
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(seed, step, counter):
    """Return the four words of each counter, as in :mod:`.reference`."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = tl.zeros_like(c0)
    c2, c3 = c1 + (step & 0xFFFFFFFF).to(tl.uint32), c1 + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        hi0, lo0 = multiply(c0, 0xD2511F53)
        hi1, lo1 = multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_at(seed, step, counter):
    """Return the words of four tokens for each counter, in their order."""
    r0, r1, r2, r3 = philox(seed, step, counter)
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))


@triton.jit
def words_of(seed, step, begin, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the words of the BLOCK tokens from ``begin`` on, in the threads that hold WIDTH tokens in 16 bytes."""
    if WIDTH == 8:
        counter = begin // 4 + 2 * tl.arange(0, BLOCK // 8)
        a0, a1, a2, a3 = philox(seed, step, counter)
        b0, b1, b2, b3 = philox(seed, step, counter + 1)
        r0, r1, r2, r3 = tl.interleave(a0, b0), tl.interleave(a1, b1), tl.interleave(a2, b2), tl.interleave(a3, b3)
        words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    else:
        words = words_at(seed, step, begin // 4 + tl.arange(0, BLOCK // 4))
    return words


@triton.jit
def uniforms(words):
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def arrival(t):
    """Return E = -log(1 - t) to 2e-7 relative, however small t is: 1 - t = 2^e (1 + f), and where e is 0, f is -t
    itself."""
    bits = (1.0 - t).to(tl.int32, bitcast=True)
    e = (bits - 0x3F2AAAAB) & -0x800000
    f = tl.where(e == 0, -t, (bits - e).to(tl.float32, bitcast=True) - 1.0)
    # p: the least error of (log(1 + f) - f + f^2 / 2) / f^3 in [-1/3, 1/3]
    p = f * 0.1401381939649582 - 0.15139269828796387
    p = p * f + 0.13999086618423462
    p = p * f - 0.1646934598684311
    p = p * f + 0.20010896027088165
    p = p * f - 0.2500436305999756
    p = p * f + 0.3333320617675781
    p = (p * f - 0.5) * (f * f) + f
    return e.to(tl.float32) * -8.262958e-8 - p  # ln 2 / 2^23


@triton.jit
def bounds_of(words, w):
    """Return an int32 lower bound of a score E / w; see `log2_bound`.

    For the float bits I(a) of a > 0, I(a) / 2^23 - 127 lies below log2 a, by 0.0861 at most. So the bits of the word
    minus those of the weight are a quotient's logarithm, for one instruction and no exponential.
    """
    return words.to(tl.float32).to(tl.int32, bitcast=True) - w.to(tl.int32, bitcast=True)


@triton.jit
def least_of_groups(bound, GROUPS: tl.constexpr):
    """Return [GROUPS]: the least bound of each group of a block, whose elements are tokens or minima of neighbours."""
    MANY: tl.constexpr = bound.shape[0]
    bound = tl.min(tl.reshape(bound, (4, MANY // 4)), 0)
    return tl.min(tl.reshape(bound, (GROUPS, MANY // 4 // GROUPS)), 1)


@triton.jit
def least_bounds(words, w, GROUPS: tl.constexpr):
    return least_of_groups(bounds_of(words, w), GROUPS)


@triton.jit
def log2_bound(bound):
    """Return a number below the log2 of every score of a group, as computed, unless one of its tokens has no weight.

    E = -log(1 - t) >= t, and t >= word / 2^32, or is cut at 1 - 2^-24, where E is 16.6 and word / 2^32 at most 1. So
    log2(E / w) >= log2(word) - 32 - log2(w) >= bound / 2^23 - 32 - 0.0861 (word 0: its bits say 2^-127, and t is
    2^-33). The rest of 0.1, a hundredth of the score, covers roundings: word, E, w, exp2, ``bound`` itself and z
    relative to two different maxima (1.5e-5) are together wrong by less than 1e-4. A weight of 0 has a bound above 2^94
    (unless its word is 0, which makes the bound too low), and cannot win.
    """
    return bound.to(tl.float32) * 1.1920928955078125e-07 - 32.1
