"""Rows for the trackers that people have: what a run was, its curves, its results.

    runs.py      a row -> TrackedRun: configuration, history, summary
    find.py      a name or a file of one's own -> a tracker
    export.py    finished rows -> a tracker, once each; also while others are being made
    tables.py    rows -> CSV and Parquet

A tracker is anything that can be called with a `TrackedRun`. The built-in ones are in
`integrations/trackers/`; one of your own is as good:

    from headwise.tracking import export

    export(Store("my-store"), lambda run: print(run.name, run.summary["held_out"]))
"""

from headwise.tracking.export import Exported, export, following
from headwise.tracking.find import find
from headwise.tracking.runs import TrackedRun, Tracker, tracked

__all__ = ["Exported", "TrackedRun", "Tracker", "export", "find", "following", "tracked"]
