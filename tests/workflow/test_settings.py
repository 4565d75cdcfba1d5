"""Settings files as inputs: an edit makes anew what it decides, and a file written again with the same bytes nothing."""

import json

NOTHING = "Nothing to be done"
TARGETS = [f"results/short/data/{blend}/check.json" for blend in ("sft", "rlvr1")]


def test_data_are_made_anew_by_an_edit_of_their_settings_and_by_nothing_else(fresh):
    fresh.snakemake(*TARGETS)
    data = fresh.results / "data"
    for name in ("source", "fill/sft", "fill/rlvr1"):
        made_from = data / name.removeprefix("fill/") / "made_from.json"
        assert made_from.read_bytes() == (fresh.results / f"settings/{name}.json").read_bytes()
    for path in (data / "source/record.json", data / "sft/manifest.json", fresh.results / "settings/fill/sft.json"):
        path.write_bytes(path.read_bytes())  # newer than all that was made from it
        assert NOTHING in fresh.snakemake("--dry-run", *TARGETS), path

    fresh.edit("holdout: 20", "holdout: 19")
    planned = fresh.snakemake("--dry-run", *TARGETS)
    assert "rule source: Updated input files: results/short/settings/source.json" in planned
    assert "rule fill: blend=sft; " in planned
    fresh.edit("holdout: 19", "holdout: 20")
    assert NOTHING in fresh.snakemake("--dry-run", *TARGETS)

    fresh.edit("holdout: 20", "holdout: 19")
    fresh.snakemake(*TARGETS)
    manifest = json.loads((data / "sft/manifest.json").read_text())
    assert manifest["validation"]["rows"] == 19
    assert json.loads((data / "sft/made_from.json").read_text())["holdout"] == 19
    assert NOTHING in fresh.snakemake("--dry-run", *TARGETS)
