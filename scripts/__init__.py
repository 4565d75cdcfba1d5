"""Stagecoach's programs: each module with a command line runs alone, as ``python -m scripts.data.fill --help``."""

import sys

if sys.argv[0] == "-m":  # this Python runs one of the programs, and may be another than the installation's
    _show = sys.excepthook

    def _explain(kind, error, trace):  # noqa: ANN001, ANN202 - of excepthook, for Pythons of any version
        lacking = issubclass(kind, ImportError) and (error.name or "").split(".")[0]
        if not lacking or lacking == "scripts":
            return _show(kind, error, trace)
        remedy = "take Stagecoach's own (in a clone: source .venv/bin/activate)"
        print(f"error: {sys.executable} lacks {lacking}; {remedy}", file=sys.stderr)

    sys.excepthook = _explain
