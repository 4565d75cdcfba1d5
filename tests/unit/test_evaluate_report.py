"""Gates judge by what was measured."""

import numpy as np
import pandas as pd
import pytest

from scripts.errors import UserError
from scripts.evaluate.gate import judge, measure
from scripts.recipe.models import Criterion

METRICS = pd.DataFrame(
    {
        "step": range(1, 11),
        "reward_mean": np.linspace(0, 1, 10),
        "reward_std": 0.2,
        "zero_variance_share": 0.1,
        "kl": [None] * 10,
        "response_length_mean": 10.0,
        "response_length_max": 12.0,
        "truncation_rate": [0.9] * 5 + [0.1] * 5,
        "entropy": 0.5,
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "seconds": 0.5,
        "environment_rewards": [[("a_simple_agent", 0.5)]] * 10,
    }
)
EVALUATION = {
    "stage": "rlvr1",
    "environments": {
        "a_simple_agent": {"rows": 5, "before": 0.2, "after": 0.9},
        "b_simple_agent": {"rows": 5, "before": 0.5, "after": 0.4},
    },
    "mean": {"before": 0.35, "after": 0.65},
}


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("held_out_change", 0.3),
        ("worst_environment_change", -0.1),
        ("final_truncation_rate", 0.1),
        ("final_reward_std", 0.2),
        ("max_kl", None),
    ],
)
def test_each_metric_of_a_gate_is_computed_as_documented(metric, value):
    measured = measure(metric, METRICS, EVALUATION)
    assert measured is None if value is None else measured == pytest.approx(value)


@pytest.mark.parametrize(
    ("criteria", "verdict"),
    [
        ([], "pass"),
        ([{"metric": "held_out_change", "min": 0.2}], "pass"),
        ([{"metric": "held_out_change", "min": 0.4}], "stop"),
        ([{"metric": "held_out_change", "min": 0.4, "action": "warn"}], "warn"),
        (
            [{"metric": "held_out_change", "min": 0.4}, {"metric": "final_entropy", "max": 0.1, "action": "warn"}],
            "stop",
        ),
        ([{"metric": "max_kl", "max": 1}], "warn"),
        ([{"metric": "worst_environment_change", "min": -0.2, "max": 0}], "pass"),
    ],
)
def test_the_verdict_is_the_gravest_and_an_unmeasured_metric_is_a_warning(criteria, verdict):
    assert judge([Criterion(**criterion) for criterion in criteria], METRICS, EVALUATION)[0] == verdict


def test_a_criterion_that_is_not_met_is_told_with_its_value():
    _, lines = judge([Criterion(metric="held_out_change", min=0.4)], METRICS, EVALUATION)
    assert lines == ["stop: held_out_change is 0.3000 (min 0.4)"]


def test_a_parent_scored_on_other_environments_is_refused():
    pytest.importorskip("torch")
    from scripts.evaluate.score import evaluation_record

    with pytest.raises(UserError, match=r"other environments \(b\)"):
        evaluation_record({"stage": "s", "step": 1, "content": "c"}, {"a": {}}, {"a": {}, "b": {}}, {})
