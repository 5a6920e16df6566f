"""The drafter workshop: data from the target itself, training, calibration, measurement.

Each step is a module with a `main`, run as `python -m models.workshop.<step>` in a process of
its own. Steps print their progress as JSON lines and leave everything else in a run folder.
"""
