"""The live page follows a training that runs, and whatever goes wrong with it hurts no training."""

import json
import time
from pathlib import Path

import pytest

from scripts.stage import live
from scripts.stage.live import live_page, write_page
from scripts.stage.progress import LIVE_PAGE


def log(run: Path, *entries: dict) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def wait_for(run: Path, words: str) -> None:
    """Wait until the page holds these words."""
    for _ in range(200):
        if (run / LIVE_PAGE).exists() and words in (run / LIVE_PAGE).read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"the page never said {words!r}")


def test_the_page_follows_the_log_and_ends_with_the_training(tmp_path):
    with live_page("rlvr1", tmp_path, 4, period=0.05):
        log(tmp_path, {"step": 1, "reward_mean": 0.25, "reward_std": 0.1, "loss": 0.5, "seconds": 60})
        wait_for(tmp_path, "step 1 of 4, about 3 min left at 60 s a step, reward 0.25, loss 0.5")
        assert 'http-equiv="refresh"' in (tmp_path / LIVE_PAGE).read_text()
        log(tmp_path, *({"step": step, "reward_mean": 0.5, "reward_std": 0.1, "seconds": 60} for step in (2, 3, 4)))
    text = (tmp_path / LIVE_PAGE).read_text()
    assert "rlvr1: ended" in text and "step 4 of 4" in text and "refresh" not in text
    assert "mean, with ± std within a group" in text and "KL to the parent" not in text


def test_a_training_that_stops_early_says_so(tmp_path):
    with pytest.raises(ValueError, match="diverged"), live_page("rlvr1", tmp_path, 4, period=0.05):
        log(tmp_path, {"step": 1, "loss": float("nan"), "seconds": 1})
        raise ValueError("diverged")
    text = (tmp_path / LIVE_PAGE).read_text()
    assert "rlvr1: stopped" in text and "<h2>Loss</h2>" not in text and "<h2>Time of a step</h2>" in text


def test_a_log_that_cannot_be_read_is_said_once_and_hurts_no_training(tmp_path, capsys):
    with live_page("rlvr1", tmp_path, 4, period=0.01):
        (tmp_path / "metrics.jsonl").mkdir()
        time.sleep(0.5)
    assert capsys.readouterr().out.count("training goes on") == 1
    assert not (tmp_path / LIVE_PAGE).exists()


def test_a_log_that_does_not_change_is_not_drawn_again(tmp_path):
    log(tmp_path, {"step": 1, "loss": 0.5, "seconds": 1})
    with live_page("rlvr1", tmp_path, 4, period=0.02):
        wait_for(tmp_path, "step 1 of 4")
        written = (tmp_path / LIVE_PAGE).stat().st_mtime_ns
        time.sleep(0.5)
        assert (tmp_path / LIVE_PAGE).stat().st_mtime_ns == written


def test_a_page_of_ten_thousand_steps_takes_moments_and_stays_small(tmp_path):
    log(tmp_path, *({"step": step, "loss": 1 / step, "reward_mean": 0.5, "seconds": 1} for step in range(1, 10_001)))
    start = time.process_time()
    write_page("<b>", tmp_path, 10_000, 10.0, is_training=True)
    assert time.process_time() - start < 5
    text = (tmp_path / LIVE_PAGE).read_text()
    assert len(text) < 100_000 and "<b>" not in text


def test_a_page_that_takes_long_to_draw_is_drawn_less_often(tmp_path, monkeypatch):
    written = []

    def draw_slowly(*_, **__):
        written.append(time.monotonic())
        log(tmp_path, {"step": len(written) + 1, "seconds": 1})
        time.sleep(0.02)

    monkeypatch.setattr(live, "write_page", draw_slowly)
    log(tmp_path, {"step": 1, "seconds": 1})
    with live_page("rlvr1", tmp_path, 4, period=0.01):
        time.sleep(0.5)
    assert written and len(written) <= 2  # at most one in a second, and the one at the end
