"""A peer's process: `python -m models.peers.answer PEER --model DIR [--draft-model DIR]`.

PEER is mlx-lm-drafts, mlx-lm-plain or mlx-dspark. Speaks `models.peers.messages` on its standard
input and output, until the input ends. Computes with the BLAS that engines use. Ends with 69 and
a line of why when the peer is not installed or cannot use the model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from models import blas
from models.peers.messages import PeerAnswer, PeerAsk, PeerReady, PeerSetting

PEERS = ("mlx-lm-drafts", "mlx-lm-plain", "mlx-dspark")


class Peer(Protocol):
    """A program that decodes greedily."""

    name: str
    batches: bool
    settings: list[PeerSetting]

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop_tokens: Collection[int],
        setting: PeerSetting,
    ) -> list[list[int]]:
        """Answers to prompts that may run together."""
        ...


def main() -> int:
    """Answer until the input ends. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="models.peers.answer", description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft-model", type=Path, help="folder of a drafter or draft model")
    arguments = parser.parse_args()
    # What a library prints must not come between our lines.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            peer = _load(arguments.peer, arguments.model, arguments.draft_model)
        except Exception as error:  # a library of others, on a model that it may not know
            words = " ".join(str(error).split())
            print(f"{arguments.peer} cannot be used: {words}", file=sys.stderr)
            return os.EX_UNAVAILABLE
        ready = PeerReady(name=peer.name, batches=peer.batches, settings=peer.settings)
        out.write(msgspec.json.encode(ready) + b"\n")
        for line in sys.stdin.buffer:
            ask = msgspec.json.decode(line, type=PeerAsk)
            out.write(msgspec.json.encode(answer(peer, ask)) + b"\n")
    return os.EX_OK


def answer(peer: Peer, ask: PeerAsk) -> PeerAnswer:
    """Decode all prompts, as many at a time as were asked for, and time it."""
    tokens: list[list[int]] = []
    started, processor_started = time.perf_counter(), time.process_time()
    for first in range(0, len(ask.prompts), ask.rows):
        group = ask.prompts[first : first + ask.rows]
        tokens += peer.decode(group, ask.max_tokens, ask.stop_tokens, ask.setting)
    return PeerAnswer(
        tokens=tokens,
        seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - processor_started,
    )


def _load(name: str, model: Path, draft_model: Path | None) -> Peer:
    blas.load()
    # MLX takes its BLAS from what the process has loaded when it is first imported.
    if name == "mlx-dspark":
        from models.peers.mlx_dspark_peer import DsparkPeer

        if draft_model is None:
            raise ValueError("mlx-dspark needs --draft-model")
        return DsparkPeer(model, draft_model)
    from models.peers.mlx_lm_peers import DraftModelPeer, PlainPeer

    return DraftModelPeer(model, draft_model) if name == "mlx-lm-drafts" else PlainPeer(model)


if __name__ == "__main__":
    sys.exit(main())
