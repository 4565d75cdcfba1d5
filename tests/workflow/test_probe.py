"""Rollouts are tried when somebody asks for them, or before a stage that wants to wait for them trains."""


def test_training_waits_for_rollouts_where_the_stage_says_so(fresh):
    assert fresh.planned_jobs()["probe"] == set()
    assert fresh.planned_jobs("results/short/rlhf/probe.json")["probe"] == {"rlhf"}
    fresh.edit("probe: {tolerated_share: 0.9}", "probe: {tolerated_share: 0.9, rollouts: true}")
    assert fresh.planned_jobs("results/short/rlvr1/ckpt")["probe"] == {"rlvr1"}
