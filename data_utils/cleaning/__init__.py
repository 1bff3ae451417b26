"""Cleaning: a recipe and raw text become clean text, a report and a manifest, by the library datatrove.

`recipe.py` reads a recipe, `run.py` does all of it. datatrove's filters, deduplication and executors do the work. What
is ours: documents come from the readers of a corpus build (`reader.py`), every removed document is counted by rule with
its bytes and ten examples (`counts.py`), and a command that was stopped continues, or is refused if anything differs.

datatrove is an optional package: `reader.py`, `filters.py`, `stages.py`, `writers.py` and `executors.py` import it, so
`run.py` imports them late.
"""
