"""A target and its drafter, loaded and ready to make lanes of.

Owns the drafter, the taps on the target and the cost tables; built at an engine's start, used
on its MLX thread. A drafter that does not fit the target raises `DrafterError`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from models.backend import DeviceKind, device_kind, device_name
from models.calibration import Calibration, CalibrationError
from models.dspark.configuration import TargetShape
from models.dspark.drafter import Drafter
from models.dspark.loader import load_drafter
from models.dspark.rows import SpeculativeRows
from models.taps import Taps
from models.target import Target
from scheduler.cost_measurement import (
    DEPTH,
    IDLE_REPEATS,
    REPEATS,
    CostMeasurement,
    row_counts,
)
from scheduler.draft_forecast import DraftForecast
from scheduler.ledger import CacheRoom
from scheduler.measuring import NOISE_SLACK, Measuring
from scheduler.messages import DraftConfigure
from scheduler.round_costs import CostKey, CostRecord, RoundCosts
from scheduler.speculation_settings import SpeculationSettings
from scheduler.speculative_lane import SpeculativeLane

log = logging.getLogger("sparklane.engine")


class Pair:
    """One target with one drafter. `measuring` is there while their costs are not known."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        taps: Taps,
        costs: RoundCosts,
        calibration: Calibration | None,
        settings: SpeculationSettings,
        measuring: Measuring | None = None,
    ) -> None:
        self.drafter = drafter
        self.costs = costs
        self.measuring = measuring
        self._target = target
        self._taps = taps
        self._calibration = calibration
        self._settings = settings

    def new_rows(self) -> SpeculativeRows:
        """Rows of the pair, none yet."""
        return SpeculativeRows(self._target, self.drafter, self._taps)

    def new_lane(self, rows: SpeculativeRows) -> SpeculativeLane:
        """A lane over `rows`."""
        forecast = DraftForecast(
            self.drafter.block_size, self._calibration, self._settings.threshold
        )
        return SpeculativeLane(rows, forecast, self.costs, self._settings)


def load_pair(
    target: Target,
    configure: DraftConfigure,
    *,
    maximum_rows: int,
    room: CacheRoom | None,
    blas: str,
    progress: Callable[[float], None],
) -> Pair:
    """Load the drafter, tap the target, and see what is known of the costs of rounds.

    Costs come from `costs_folder` as far as they were measured there before. What is missing is
    left to the pair's `measuring`; only where a fixed rule speculates from the first token on it
    is measured here, and `progress` gets the share that is done.
    """
    folder = Path(configure.drafter)
    drafter = load_drafter(
        folder,
        target.model,
        TargetShape.read(target.facts.folder),
        bits=draft_bits(configure),
        group_size=configure.group_size,
        own_head=configure.own_head,
        shortlist=configure.shortlist,
    )
    taps = Taps(target.model, drafter.configuration.tap_layers)
    settings = SpeculationSettings(
        always=configure.always,
        cap=configure.maximum_draft_tokens,
        threshold=configure.confidence_threshold,
        rejection=configure.rejection,
    )
    key = cost_key(target, drafter, configure, maximum_rows=maximum_rows, blas=blas)
    costs_folder = Path(configure.costs_folder) if configure.costs_folder else None
    record = CostRecord.load(costs_folder, key) if costs_folder else None
    costs = RoundCosts(record or CostRecord(key=key, verify=[], draft={}), complete=False)
    measurement = CostMeasurement(
        target,
        drafter,
        taps,
        costs,
        rows=_row_counts(maximum_rows, room, forced=settings.forced),
        repeats=REPEATS if settings.forced else IDLE_REPEATS,
        found=lambda record: record.save(costs_folder) if costs_folder else None,
    )
    while settings.forced and not measurement.complete:
        if measurement.run_slice():
            progress(measurement.timed / measurement.total)
    measuring = Measuring(measurement, room, DEPTH + NOISE_SLACK)
    return Pair(
        target,
        drafter,
        taps,
        costs,
        _calibration(folder, drafter.block_size),
        settings,
        measuring if measuring.wanted else None,
    )


def _row_counts(maximum_rows: int, room: CacheRoom | None, *, forced: bool) -> list[int]:
    """Row counts to measure: those whose noise has room in caches that hold nothing else.

    A fixed rule cannot do without any: it measures one row in any case.
    """
    counts = [
        count
        for count in row_counts(maximum_rows)
        if room is None or room.has_room([], count, DEPTH + NOISE_SLACK)
    ]
    if counts or forced:
        return counts or [1]
    log.warning("there is no room to measure what rounds cost: nothing is drafted")
    return []


def _calibration(folder: Path, block_size: int) -> Calibration | None:
    try:
        return Calibration.load(folder, block_size)
    except CalibrationError as error:
        log.warning("the drafter counts as uncalibrated: %s", error)
        return None


def draft_bits(configure: DraftConfigure) -> int:
    """Bits of the drafter's weights: quantized products are slow on the CPU."""
    return configure.bits or (16 if device_kind() is DeviceKind.CPU else 4)


def cost_key(
    target: Target, drafter: Drafter, configure: DraftConfigure, *, maximum_rows: int, blas: str
) -> CostKey:
    """What the costs of this pair, as loaded here, depend on."""
    folder = Path(configure.drafter).resolve()
    # Another drafter may come to lie in the same place; what it costs is decided by its shape.
    shape = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:12]
    loaded = f"{folder} ({shape}) at {draft_bits(configure)} bits"
    if drafter.short_head is not None:
        loaded += f" over {len(drafter.short_head)} tokens"
    return CostKey(
        machine=f"{platform.machine()} {platform.processor()} {os.cpu_count()} {device_name()}",
        backend=device_kind(),
        blas=blas,
        mlx=version("mlx"),
        target=f"{target.facts.folder.resolve()} in {target.precision}",
        drafter=loaded,
        maximum_rows=maximum_rows,
    )
