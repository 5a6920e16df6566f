"""Train a drafter on a corpus that its target wrote.

Run as `python -m models.workshop.training --target DIR --corpus DIR --run DIR`, in a process of
its own. Ends after `--steps`, or after `--seconds` of wall clock, with the learning rates
following whichever is further along. `--resume` goes on from the last checkpoint: the same
batches, anchors and rates as an uninterrupted run of the same number of steps. With
`--stored-taps` the target is not run: what `tap_storage` wrote is read instead. Leaves
`drafter/`, `log.jsonl`, `checkpoint/` and `training.png` in the run folder. Exits with 2 when
the run cannot begin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, HeadKind, TargetShape, check_fit
from models.dspark.drafter import Drafter, DraftNetwork, TargetVocabulary
from models.workshop.checkpoint_files import read_weights, write_drafter
from models.workshop.corpus import Corpus, Packed
from models.workshop.frozen_target import FrozenTarget, training_precision
from models.workshop.network import (
    find_mask_token,
    initialise,
    new_configuration,
    spread_taps,
    warm_start,
)
from models.workshop.objective import Losses
from models.workshop.optimizer import GroupedOptimizer, OptimizerSettings, Parameters, rate_share
from models.workshop.progress import refuse, say
from models.workshop.quantization import Recipe
from models.workshop.run_folder import RunError, RunFolder, fingerprint, versions
from models.workshop.sequences import train_on_sequences
from models.workshop.stored_taps import (
    DTYPES,
    FOLDER,
    MANIFEST,
    StoredTaps,
    TapSettings,
    corpus_mark,
)
from models.workshop.training_options import parse_options
from models.workshop.training_step import (
    Inputs,
    TrainingStep,
    finished_weights,
    make_inputs,
    tap_scale,
    unfinished_weights,
)

_AGREE = (
    "fingerprint",
    "corpus",
    "corpus_mark",
    "precision",
    "drafter",
    "optimizer",
    "seed",
    "anchors",
    "batch_tokens",
    "longest",
    "held_out",
    "quantize_aware",
)


class Training:
    """A run: what it trains, with what, and where it stands."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = RunFolder(options.run)
        self._corpus = Corpus(*options.corpus)
        shape = TargetShape.read(options.target)
        marks = fingerprint(options.target)
        self._corpus.check(marks)
        taps = options.tap_layers or spread_taps(shape.layer_count)
        recipe = Recipe.parse(options.quantize_aware) if options.quantize_aware else None
        configuration = new_configuration(
            json.loads((options.target / "config.json").read_text()),
            tap_layers=taps,
            layers=options.layers,
            block_size=options.block,
            rank=options.rank,
            head=HeadKind(options.head),
            mask_token=options.mask_token
            if options.mask_token is not None
            else find_mask_token(options.target, shape.vocabulary_size, shape.stop_tokens),
        )
        check_fit(configuration, shape)
        precision = options.precision or training_precision()
        marks_of_shards, origins = self._corpus.shard_marks(), self._corpus.origins
        settings = TapSettings(
            tap_layers=tuple(taps),
            precision=precision,
            fingerprint=marks,
            hidden_size=shape.hidden_size,
        )
        self._stored: StoredTaps | None = None
        if options.stored_taps is not None:
            if len(options.corpus) > 1:
                raise RunError(
                    f"--stored-taps are of one corpus, --corpus names {len(options.corpus)}: "
                    "give one, or leave --stored-taps out"
                )
            folder = Path(options.stored_taps or options.corpus[0] / FOLDER)
            self._stored = StoredTaps(folder, self._corpus, settings, marks_of_shards)
        self._settings = OptimizerSettings(
            muon=options.optimizer == "muon",
            matrix_rate=options.matrix_rate,
            markov_rate=options.markov_rate,
            other_rate=options.rate,
        )
        self._folder.remember(
            {
                "fingerprint": marks,
                "corpus": origins[0] if len(origins) == 1 else origins,
                "corpus_mark": corpus_mark(marks_of_shards),
                "precision": precision,
                "stored_taps": self._stored is not None,
                "drafter": {**configuration.source, "quantization": None},
                "optimizer": {
                    name: getattr(self._settings, name) for name in self._settings.__struct_fields__
                },
                "seed": options.seed,
                "anchors": options.anchors,
                "batch_tokens": options.batch_tokens,
                "longest": options.longest,
                "held_out": options.held_out,
                "quantize_aware": options.quantize_aware,
                "start_from": str(options.start_from) if options.start_from else None,
                "steps": options.steps,
                "seconds": options.seconds,
                "versions": versions(),
            },
            _AGREE,
        )
        self._frozen = FrozenTarget.load(options.target, taps, precision)
        network = DraftNetwork(configuration, own_head=False)
        initialise(network, options.seed, self._frozen.final_norm)
        if options.start_from is not None:
            warm_start(network, configuration.head_kind, read_weights(options.start_from))
        train_on_sequences(network)
        vocabulary = TargetVocabulary(
            self._frozen.target.model, configuration.vocabulary_size, configuration.hidden_size
        )
        if self._stored is not None:
            self._frozen.forget_layers()
        self.drafter = Drafter(configuration, network, vocabulary, DTYPES[precision])
        flat: Any = dict(tree_flatten(network.parameters()))
        # A layer's scalar is part of the architecture, not learned.
        self._fixed = {name: v for name, v in flat.items() if name.endswith("layer_scalar")}
        self.parameters: Parameters = {n: v for n, v in flat.items() if n not in self._fixed}
        optimizer = GroupedOptimizer(self._settings, self.parameters)
        self._state = optimizer.initial_state()
        self._step = TrainingStep(
            self._frozen, self.drafter, optimizer, DTYPES[precision], options.rows, recipe
        )
        self._indices, held_out = self._corpus.split(options.held_out)
        self._held_out = _pieces(held_out, self._rows())
        self.steps = 0
        self.elapsed = 0.0
        self._scale: mx.array | None = None
        self._resume()

    def run(self) -> dict[str, Any]:
        """Train to the end, and write the drafter. Returns the last figures."""
        options = self._options
        if self._scale is None:
            first = itertools.islice(self._plan(), 4)
            self._scale = tap_scale(self._taps(indices) for _, indices in first)
            if options.start_from is not None:
                self.parameters = unfinished_weights(self.parameters, self._scale)
        started = time.monotonic() - self.elapsed
        saved = time.monotonic()
        last: dict[str, Any] = {}
        pending: deque[mx.array] = deque()
        window, window_steps = time.monotonic(), self.steps
        for step, indices in self._plan():
            self.elapsed = time.monotonic() - started
            progress = self._progress(step)
            if progress >= 1.0:
                break
            share = mx.array(rate_share(progress, self._settings.warmup))
            seed = [options.seed, 1, step]
            inputs = self._inputs(indices, seed)
            self.parameters, self._state, losses, norm = self._step.train(
                self.parameters, self._state, share, self._scale, *inputs
            )
            mx.async_eval(self.parameters, self._state, losses, norm)
            self.steps = step + 1
            pending.append(losses.total)
            if len(pending) > 2:
                # The host runs ahead by two steps and no more.
                mx.eval(pending.popleft())
            if self.steps % options.log_every == 0:
                now = time.monotonic()
                rate = (self.steps - window_steps) / max(now - window, 1e-9)
                last = self._record(losses, norm, rate, progress)
                window, window_steps = time.monotonic(), self.steps
            if time.monotonic() - saved > options.save_every:
                self.elapsed = time.monotonic() - started
                self.save()
                saved = time.monotonic()
        self.elapsed = time.monotonic() - started
        self.save()
        last = {**last, **self._evaluate(), "steps": self.steps, "seconds": round(self.elapsed, 1)}
        missing = self._folder.plot()
        if missing:
            say("note", message=missing)
        return last

    def save(self) -> None:
        """Write a checkpoint, and the drafter as it now is."""
        assert self._scale is not None
        arrays = {f"parameter/{name}": value for name, value in self.parameters.items()}
        arrays.update({f"optimizer/{name}": value for name, value in self._state.items()})
        arrays["tap_scale"] = self._scale
        mx.eval(arrays)
        self._folder.save(arrays, {"step": self.steps, "elapsed": self.elapsed})
        weights = finished_weights({**self.parameters, **self._fixed}, self._scale)
        write_drafter(self._folder.path / "drafter", self.drafter.configuration, weights)

    def _resume(self) -> None:
        stored = self._folder.load()
        if stored is None or not self._options.resume:
            return
        arrays, facts = stored
        self._scale = arrays.pop("tap_scale")
        for name, value in arrays.items():
            kind, path = name.split("/", 1)
            (self.parameters if kind == "parameter" else self._state)[path] = value
        self.steps, self.elapsed = facts["step"], facts["elapsed"]

    def _plan(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Steps not yet done, and their batches."""
        options, step = self._options, 0
        for epoch in itertools.count():
            before = step
            for indices in self._corpus.batches(
                self._indices, options.batch_tokens, options.longest, options.seed, epoch
            ):
                if step >= self.steps:
                    yield step, indices
                step += 1
            if step == before:
                raise RunError("the corpus has no batch to train on: generate more")

    def _progress(self, step: int) -> float:
        options = self._options
        shares = [step / options.steps if options.steps else 0.0]
        if options.seconds:
            shares.append(self.elapsed / options.seconds)
        return max(shares)

    def _pack(self, indices: NDArray[np.int64]) -> Packed:
        return self._corpus.pack(indices, self._options.longest)

    def _taps(self, indices: NDArray[np.int64]) -> tuple[mx.array, NDArray[np.bool_]]:
        """The taps of a batch, and which of its tokens are supervised."""
        packed = self._pack(indices)
        if self._stored is not None:
            return self._stored.read(indices, packed.tokens.shape[1])[0], packed.supervised
        return self._frozen.read(mx.array(packed.tokens))[0], packed.supervised

    def _inputs(self, indices: NDArray[np.int64], seed: list[int]) -> Inputs:
        options, packed, stored = self._options, self._pack(indices), self._stored
        taken = () if stored is None else stored.read(indices, packed.tokens.shape[1])
        return make_inputs(packed, options.anchors, options.block, seed, taken)

    def _rows(self) -> int:
        return max(1, int(self._options.batch_tokens // self._options.longest))

    def _record(
        self, losses: Losses, norm: mx.array, rate: float, progress: float
    ) -> dict[str, Any]:
        mx.eval(losses, norm)
        record = {
            "step": self.steps,
            "progress": round(progress, 4),
            "loss": losses.total.item(),
            "cross_entropy": losses.cross_entropy.item(),
            "distance": losses.distance.item(),
            "confidence": losses.confidence.item(),
            "tokens_per_round": losses.tokens_per_round.item(),
            "gradient_norm": norm.item(),
            "steps_per_second": round(rate, 3),
            "memory": mx.get_peak_memory(),
        }
        if self.steps % self._options.evaluate_every == 0:
            record.update(self._evaluate())
        self._folder.log(record)
        say("progress", done=round(progress, 4), total=1.0, **record)
        return record

    def _evaluate(self) -> dict[str, Any]:
        """Losses on conversations that are never trained on."""
        if not self._held_out or self._scale is None:
            return {}
        all_losses = []
        for number, indices in enumerate(self._held_out):
            inputs = self._inputs(indices, [self._options.seed, 2, number])
            all_losses.append(self._step.evaluate(self.parameters, self._scale, *inputs))
            mx.eval(all_losses)
        count = len(all_losses)

        def mean(name: str) -> float:
            return float(sum(getattr(one, name).item() for one in all_losses) / count)

        return {
            "held_out_loss": mean("total"),
            "held_out_distance": mean("distance"),
            "held_out_tokens_per_round": mean("tokens_per_round"),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = parse_options(arguments)
    try:
        training = Training(options)
        say(
            "start",
            command="train",
            resumed_at=training.steps,
            parameters=sum(value.size for value in training.parameters.values()),
            taps=list(training.drafter.configuration.tap_layers),
            stored_taps=options.stored_taps is not None,
        )
        if options.stored_taps is None and (options.corpus[0] / FOLDER / MANIFEST).exists():
            say("note", message="the corpus has stored taps: --stored-taps reads them")
        result = training.run()
    except (CheckpointError, DrafterError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot train: {error}")
    say("result", command="train", drafter=str(options.run / "drafter"), **result)
    return 0


def _pieces(indices: NDArray[np.int64], rows: int) -> list[NDArray[np.int64]]:
    return [indices[at : at + rows] for at in range(0, len(indices), rows)]


if __name__ == "__main__":
    sys.exit(main())
