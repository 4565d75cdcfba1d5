"""Orders drawn at random that stay the same in every version."""

import hashlib

import numpy as np


def random_order(count: int, drawn_from: str) -> np.ndarray:
    """Return the numbers below `count` in an order that follows from the text `drawn_from` alone.

    Random bits are drawn and sorted here: NumPy promises the same bits in every version, but no such promise covers
    its permutations.
    """
    seed = int.from_bytes(hashlib.sha256(drawn_from.encode()).digest())
    random_bits = np.random.PCG64(seed).random_raw(count)
    return np.argsort(random_bits, kind="stable")
