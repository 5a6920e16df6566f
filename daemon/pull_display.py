"""The progress bar of `sparklane pull`.

Owns how the stages of a pull look: one bar a stage, on standard error, and nothing but the
names of the stages where that is no terminal. Runs in the command line's process, in the
thread that pulls; cannot fail.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from daemon.catalog import Progress as Report
from daemon.catalog import Stage

_WORDS = {
    Stage.WAITING: "waiting for another pull",
    Stage.DOWNLOAD: "downloading",
    Stage.UNPACK: "unpacking",
    Stage.CHECK: "checking",
    Stage.CONVERT: "converting",
    Stage.WRITE: "writing",
}


class PullDisplay:
    """Shows the reports of one pull, from `with` to its end."""

    def __init__(self, model: str, console: Console | None = None) -> None:
        self._model = model
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Elapsed())
        self._bars = Progress(*columns, console=self._console)
        self._stage: Stage | None = None
        self._bar: TaskID | None = None

    def show(self, report: Report) -> None:
        """Say how far the pull is."""
        if report.stage is not self._stage:
            self._next(report.stage)
        if self._bar is not None:
            self._bars.update(self._bar, completed=report.done, total=report.total or None)

    def _next(self, stage: Stage) -> None:
        self._end_stage()
        self._stage = stage
        words = f"{self._model}: {_WORDS[stage]}"
        if self._console.is_terminal:
            self._bars.start()
            # No total yet: the bar moves without saying how far.
            self._bar = self._bars.add_task(words, total=None)
        else:
            self._console.print(words, highlight=False)

    def _end_stage(self) -> None:
        """The last stage is complete, whether or not it said so."""
        if self._bar is not None:
            total = self._bars.tasks[self._bars.task_ids.index(self._bar)].total or 1
            self._bars.update(self._bar, completed=total, total=total)

    def __enter__(self) -> PullDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._end_stage()
        if self._bar is not None:
            self._bars.stop()
