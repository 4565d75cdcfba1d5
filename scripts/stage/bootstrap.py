"""Intervals of changes in held-out scores, by a paired bootstrap over rows.

An observation is a row's reward after less its reward before, so rows hard for both policies cancel out. Rows are drawn
with replacement within each environment; the interval lies between percentiles of the resampled means (Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). Of n rows n - 1 are drawn, for an unbiased variance of
small environments (Rao and Wu, Resampling Inference With Complex Survey Data, JASA 83, 1988).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES, BATCH = 2000, 100
LEAST_ROWS = 10
SEED = 0

Change = dict[str, float]


def changes(differences: Mapping[str, np.ndarray]) -> tuple[dict[str, Change | None], Change | None]:
    """Return the change of each environment, and of their mean, from the rows' differences.

    A change has the mean difference (value) and the bounds of its 95 % interval (low, high). Environments have bounds
    that hold for all at once too (joint_low, joint_high; Bonferroni), for picking the worst. None with fewer than 10
    rows; for the mean also where an environment has a single row.
    """
    resampled = resample(differences)
    enough = [name for name, rows in differences.items() if len(rows) >= LEAST_ROWS]
    found: dict[str, Change | None] = dict.fromkeys(differences)
    for name in enough:
        low, high = interval(resampled[name], len(enough))
        found[name] = _change(differences[name].mean(), resampled[name]) | {"joint_low": low, "joint_high": high}
    if len(resampled) < len(differences) or sum(map(len, differences.values())) < LEAST_ROWS:
        return found, None
    value = np.mean([rows.mean() for rows in differences.values()])
    return found, _change(value, np.mean(list(resampled.values()), axis=0))


def resample(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the means of 2000 resamples of each environment's rows, (2000,); an environment with a row is left out.

    Equal environments with equal numbers of rows draw the same rows, so means of two policies are pairs.
    """
    generator = np.random.default_rng(SEED)
    return {name: _resampled_means(values, generator) for name, values in rows.items() if len(values) > 1}


def interval(means: np.ndarray, compared: int = 1) -> tuple[float, float]:
    """Return the 95 % bounds of resampled means, for `compared` comparisons at once (Bonferroni)."""
    confidence = 1 - (1 - CONFIDENCE) / max(1, compared)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return round(float(low), 6), round(float(high), 6)


def _resampled_means(rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    size = (BATCH, len(rows) - 1)
    drawn = (rows[generator.integers(len(rows), size=size)] for _ in range(RESAMPLES // BATCH))
    return np.concatenate([sample.mean(axis=1) for sample in drawn])


def _change(value: Any, means: np.ndarray) -> Change:
    low, high = interval(means)
    return {"value": round(float(value), 6), "low": low, "high": high}
