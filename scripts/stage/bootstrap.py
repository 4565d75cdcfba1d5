"""How sure a difference of held-out scores is: a paired bootstrap over the rows.

A row's difference (reward after less reward before) is one observation, so what both policies find hard or easy cancels
out. Rows are resampled with replacement, within each environment by itself, and the interval lies between the
percentiles of the resampled means (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). Of n rows
n - 1 are drawn, which makes the variance unbiased also where environments have few rows (Rao and Wu, Resampling
Inference With Complex Survey Data, JASA 83, 1988).
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
    """The change of every environment and of the mean over the environments, from the rows' differences.

    A change is the mean difference (value) with the bounds of its 95 % interval (low, high). An environment's has
    besides bounds that hold for all environments at once (joint_low, joint_high; Bonferroni): the ones to use where the
    worst of them is picked out. None where there are fewer than 10 rows, of which the interval would be too narrow; for
    the mean also where an environment has a single row, which says nothing of its scatter.
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
    """The means of 2000 resamples of each environment's rows, (2000,); none of an environment with a single row.

    Where the environments and their numbers of rows are equal, the same rows are drawn: means of two policies on the
    same held-out rows are pairs.
    """
    generator = np.random.default_rng(SEED)
    return {name: _resampled_means(values, generator) for name, values in rows.items() if len(values) > 1}


def interval(means: np.ndarray, compared: int = 1) -> tuple[float, float]:
    """The bounds of resampled means that hold with 95 % for so many comparisons at once (Bonferroni)."""
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
