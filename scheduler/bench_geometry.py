"""Speculation at published shapes with random weights: `python -m scheduler.bench_geometry`.

Real weights of these sizes are not needed to know what rounds cost and how well the width is
chosen: shapes decide the one and acceptance the other. Here the shapes are those of published
pairs, weights are random, and acceptance is drawn from a profile instead of being found by the
verification, whose every operation still runs. Owns MLX on its main thread; prints JSON lines.

For each pair and row count, in one run: the serial lane, every fixed width, and the lane as it
chooses by itself, for profiles of chat, code, mathematics and of no acceptance at all: with a
forecast that learns from what is accepted, and with one that is calibrated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma4_text, qwen3

from models import cuda_settings
from models.backend import device_kind, device_name
from models.checkpoint import CheckpointFacts
from models.decode_rows import TargetRows
from models.dspark.configuration import parse_configuration
from models.dspark.drafter import Choose, Drafter, DraftNetwork, TargetVocabulary, greedy
from models.dspark.loader import quantize
from models.dspark.rows import SpeculativeRows, Verification
from models.sampling import RowSampling
from models.sampling_settings import Sampling
from models.taps import Taps
from models.target import Target
from scheduler.cost_measurement import measure
from scheduler.draft_forecast import DraftForecast
from scheduler.published_geometries import GEOMETRIES
from scheduler.round_costs import CostKey, RoundCosts
from scheduler.row import Row
from scheduler.serial_lane import SerialLane
from scheduler.speculation_settings import SpeculationSettings
from scheduler.speculative_lane import SpeculativeLane
from scheduler.width_policy import WidthChoice

DEPTH = 512
ROUNDS = 24
STEPS = 40

# Conditional acceptance at every position, as published drafters have it by kind of text.
PROFILES = {"chat": 0.74, "code": 0.86, "math": 0.89, "none": 0.0}

_MODULES: dict[str, Any] = {"qwen3": qwen3, "gemma4_text": gemma4_text}


class SyntheticRows(SpeculativeRows):
    """Rows whose acceptance is drawn with a fixed chance instead of being compared."""

    acceptance = 0.0

    def verify(
        self,
        anchors: mx.array,
        drafts: mx.array | None = None,
        *,
        lengths: Sequence[int] | None = None,
        choose: Choose = greedy,
    ) -> Verification:
        """The real verification; only its count is replaced."""
        found = super().verify(anchors, drafts, lengths=lengths, choose=choose)
        drafted = 0 if drafts is None else drafts.shape[1]
        counts = []
        for row in range(len(self)):
            limit = drafted if lengths is None else lengths[row]
            count = 0
            while count < limit and random.random() < self.acceptance:
                count += 1
            counts.append(count)
        # The real count is kept in the graph, so that the comparison is paid for.
        accepted = found.accepted * 0 + mx.array(counts, dtype=mx.int32)
        return Verification(found.tokens, accepted, found.logits)


class FixedWidthLane(SpeculativeLane):
    """A lane that verifies the same width in every round."""

    width = 1

    def _choose(self) -> WidthChoice:
        length = self.width - 1 if all(self._survival) else 0
        return WidthChoice.of(self._survival, [length] * len(self))


class CalibratedForecast(DraftForecast):
    """What a calibrated drafter's confidences would say: the chance that drafts really have."""

    def __init__(self, block_size: int, acceptance: float) -> None:
        super().__init__(block_size, None)
        self._survival = [acceptance**place for place in range(1, block_size + 1)]

    @property
    def learns(self) -> bool:
        """It is right already."""
        return False

    def survival(
        self,
        request_id: int,
        confidence_logits: Sequence[float] | None,
        sampling_temperature: float,
    ) -> list[float]:
        """The same for every block."""
        return list(self._survival)


def build_target(configuration: dict[str, Any], bits: int, name: str) -> Target:
    """A target of random bfloat16 weights, quantized to `bits` unless 16."""
    module = _MODULES[configuration["model_type"]]
    model: nn.Module = module.Model(module.ModelArgs.from_dict(configuration))
    model.set_dtype(mx.bfloat16)
    if bits != 16:
        nn.quantize(model, 64, bits)
    _evaluate(model)
    facts = CheckpointFacts(
        name=name,
        folder=Path(name),
        model_type=configuration["model_type"],
        architectures=(),
        vocabulary_size=configuration["vocab_size"],
        context_length=configuration["max_position_embeddings"],
        stop_tokens=(),
        parameters=0,
        weight_bytes=0,
        kv_layers=(),
        quantization=None,
        precision="bfloat16",
    )
    return Target(facts, model, f"{bits}-bit")


def build_drafter(configuration: dict[str, Any], target: Target, bits: int) -> Drafter:
    """A drafter of random weights that borrows the target's embedding and head."""
    parsed = parse_configuration(configuration)
    network = DraftNetwork(parsed, own_head=False)
    network.set_dtype(mx.bfloat16)
    if bits != 16:
        quantize(network, bits, 64)
    network.eval()
    _evaluate(network)
    vocabulary = TargetVocabulary(target.model, parsed.vocabulary_size, parsed.hidden_size)
    return Drafter(parsed, network, vocabulary, mx.bfloat16)


def _evaluate(module: nn.Module) -> None:
    """One weight after the other, so that no more than one is held twice."""
    tree_map(mx.eval, module.parameters())


class Bench:
    """All measurements of one pair."""

    def __init__(self, target: Target, drafter: Drafter, rows: int) -> None:
        self.target = target
        self.drafter = drafter
        self.taps = Taps(target.model, drafter.configuration.tap_layers)
        key = CostKey(
            machine=device_name(),
            backend=device_kind(),
            blas="",
            mlx=version("mlx"),
            target=target.precision,
            drafter="",
            maximum_rows=rows,
        )
        # The first round of a shape compiles its kernels, for minutes in all on a new machine.
        measure(target, drafter, self.taps, key, depths=(DEPTH,), repeats=1)
        self.record = measure(target, drafter, self.taps, key, depths=(DEPTH,))
        self.costs = RoundCosts(self.record)

    def serial_speed(self, rows: int) -> float:
        """Tokens per second of the serial lane."""
        state = TargetRows(self.target)
        state.batch = self.target.noise_batch(rows, DEPTH)
        mx.eval(state.batch.state())
        lane = SerialLane(state)
        lane.add(_rows(rows), mx.zeros((rows, 1), dtype=mx.int32))
        for _ in range(4):
            lane.launch()
            lane.collect(keep=1)
        started = time.perf_counter()
        for _ in range(STEPS):
            lane.launch()
            lane.collect(keep=1)
        return rows * STEPS / (time.perf_counter() - started)

    def lane(
        self, rows: int, acceptance: float, width: int | None, *, calibrated: bool = False
    ) -> SpeculativeLane:
        """A lane of `rows` rows at DEPTH; of a fixed width, or one that chooses."""
        state = SyntheticRows(self.target, self.drafter, self.taps)
        state.acceptance = acceptance
        block = self.drafter.block_size
        forecast = (
            CalibratedForecast(block, acceptance) if calibrated else DraftForecast(block, None)
        )
        settings = SpeculationSettings(always=width is not None)
        kind = SpeculativeLane if width is None else FixedWidthLane
        lane = kind(state, forecast, self.costs, settings)
        if width is not None:
            lane.width = width  # type: ignore[attr-defined]
        for row in _rows(rows):
            piece = SyntheticRows(self.target, self.drafter, self.taps)
            piece.fill_with_noise(1, DEPTH)
            lane.join([row], [piece], [0])
        return lane

    def round_seconds(self, rows: int, width: int) -> float:
        """Median wall time of a round of that width, bookkeeping included."""
        lane = self.lane(rows, 0.5, width)
        for _ in range(4):
            lane.step()
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            lane.step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def chosen_speed(
        self, rows: int, acceptance: float, seconds: float, *, calibrated: bool
    ) -> tuple[float, float]:
        """Tokens per second of the lane's own choices, and their mean width.

        Tokens are those that a round of that width commits on average: what is drawn decides the
        lane's choices, but as a figure it would need thousands of rounds.
        """
        lane = self.lane(rows, acceptance, None, calibrated=calibrated)
        tokens = 0.0
        widths: list[int] = []
        for _ in range(ROUNDS):
            lane.step()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            _, record = lane.step()
            widths.append(1 if record is None else record.width)
            tokens += rows * expected_tokens(acceptance, widths[-1])
        return tokens / (time.perf_counter() - started), statistics.mean(widths)


def _rows(count: int) -> list[Row]:
    return [
        Row(
            request_id=index,
            sampling=RowSampling(Sampling(temperature=0.0), 1, []),
            position=DEPTH + 1,
            produced=0,
            maximum=10**9,
            stop_tokens=frozenset(),
            logprobs=None,
        )
        for index in range(count)
    ]


def expected_tokens(acceptance: float, width: int) -> float:
    """Tokens that a row commits in a round of that width, on average."""
    return sum(acceptance**position for position in range(width))


def main() -> None:
    """Measure one pair and print."""
    cuda_settings.prepare(growing_keys=True)
    parser = argparse.ArgumentParser(prog="scheduler.bench_geometry", description=__doc__)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), required=True)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8, 16))
    parser.add_argument("--draft-bits", type=int, default=4, choices=(4, 8, 16))
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measured run")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try it out")
    arguments = parser.parse_args()
    target_shape, draft_shape = GEOMETRIES[arguments.geometry]
    if arguments.scale > 1:
        target_shape, draft_shape = (
            _scaled(shape, arguments.scale) for shape in (target_shape, draft_shape)
        )
    started = time.perf_counter()
    target = build_target(target_shape, arguments.bits, arguments.geometry)
    drafter = build_drafter(draft_shape, target, arguments.draft_bits)
    row_counts = [int(rows) for rows in arguments.rows.split(",")]
    bench = Bench(target, drafter, max(row_counts))
    _print(
        what="pair",
        geometry=arguments.geometry,
        bits=arguments.bits,
        draft_bits=arguments.draft_bits,
        device=device_name(),
        target_bytes=target.weight_bytes,
        drafter_bytes=drafter.weight_bytes,
        seconds=time.perf_counter() - started,
    )
    table = bench.costs.table(DEPTH)
    for rows in row_counts:
        walls = {w: bench.round_seconds(rows, w) for w in table.widths() if w > 1}
        serial = bench.serial_speed(rows)
        draft = table.draft[rows] if rows in table.draft else bench.costs.draft_seconds(rows)
        for width, wall in walls.items():
            verify = table.verify_seconds(rows, width)
            _print(
                what="round",
                rows=rows,
                width=width,
                milliseconds=1e3 * wall,
                verify_milliseconds=1e3 * verify,
                draft_milliseconds=1e3 * draft,
                overhead=(wall - verify - draft) / wall,
            )
        for name, acceptance in PROFILES.items():
            fixed = {w: rows * expected_tokens(acceptance, w) / wall for w, wall in walls.items()}
            fixed[1] = serial
            best = max(fixed, key=lambda width: fixed[width])
            for calibrated in (True, False):
                # Anew for each: a machine's speed drifts by more than choices differ.
                serial = bench.serial_speed(rows)
                if best > 1:
                    wall = bench.round_seconds(rows, best)
                    fixed[best] = rows * expected_tokens(acceptance, best) / wall
                else:
                    fixed[1] = serial
                speed, mean_width = bench.chosen_speed(
                    rows, acceptance, arguments.seconds, calibrated=calibrated
                )
                _print(
                    what="choice",
                    rows=rows,
                    profile=name,
                    forecast="calibrated" if calibrated else "learned",
                    serial=serial,
                    chosen=speed,
                    mean_width=mean_width,
                    best_width=best,
                    best_fixed=fixed[best],
                    of_best=speed / fixed[best],
                    of_serial=speed / serial,
                )


def _scaled(shape: dict[str, Any], scale: int) -> dict[str, Any]:
    small = dict(shape)
    for key in ("hidden_size", "intermediate_size", "vocab_size", "vocab_size_per_layer_input"):
        if key in small:
            small[key] //= scale
    if "mask_token_id" in small:
        small["mask_token_id"] = 4
    return small


def _print(**fields: Any) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
