"""A target and its drafter, loaded, measured and ready to make lanes of.

Owns the drafter, the taps on the target and the cost tables; built at an engine's start, used
on its MLX thread. A drafter that does not fit the target raises `DrafterError`.
"""

from __future__ import annotations

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
from scheduler.cost_measurement import measure
from scheduler.draft_forecast import DraftForecast
from scheduler.messages import DraftConfigure
from scheduler.round_costs import CostKey, CostRecord, RoundCosts
from scheduler.speculative_lane import SpeculationSettings, SpeculativeLane

log = logging.getLogger("sparklane.engine")


class Pair:
    """One target with one drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        taps: Taps,
        costs: RoundCosts,
        calibration: Calibration | None,
        settings: SpeculationSettings,
    ) -> None:
        self.drafter = drafter
        self.costs = costs
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
    blas: str,
    progress: Callable[[float], None],
) -> Pair:
    """Load the drafter, tap the target, and know what rounds cost.

    Costs come from `costs_folder` when they were measured there before; `progress` gets the
    share of a measurement that is done.
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
    key = cost_key(target, drafter, configure, maximum_rows=maximum_rows, blas=blas)
    costs_folder = Path(configure.costs_folder) if configure.costs_folder else None
    record = CostRecord.load(costs_folder, key) if costs_folder else None
    if record is None:
        record = measure(target, drafter, taps, key, progress=progress)
        if costs_folder:
            record.save(costs_folder)
    try:
        calibration = Calibration.load(folder, drafter.block_size)
    except CalibrationError as error:
        log.warning("the drafter counts as uncalibrated: %s", error)
        calibration = None
    settings = SpeculationSettings(
        always=configure.always,
        cap=configure.maximum_draft_tokens,
        threshold=configure.confidence_threshold,
        rejection=configure.rejection,
    )
    return Pair(target, drafter, taps, RoundCosts(record), calibration, settings)


def draft_bits(configure: DraftConfigure) -> int:
    """Bits of the drafter's weights: quantized products are slow on the CPU."""
    return configure.bits or (16 if device_kind() is DeviceKind.CPU else 4)


def cost_key(
    target: Target, drafter: Drafter, configure: DraftConfigure, *, maximum_rows: int, blas: str
) -> CostKey:
    """What the costs of this pair, as loaded here, depend on."""
    loaded = f"{Path(configure.drafter).resolve()} at {draft_bits(configure)} bits"
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
