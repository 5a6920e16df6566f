"""From checkpoints and configuration to memory plans.

Gathers what `scheduler.memory_plan` adds up: the checkpoint's sizes, the precision it will run
in, the limit of this machine. Runs once, before the engines start; reads a few small files and
may ask `nvidia-smi`. Raises `SparklaneError` when the models do not fit. Never imports mlx, so
whether there is a GPU is told from what is installed.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from daemon.configuration import MemorySection, ModelSection, Precision
from daemon.draft_section import is_given
from daemon.drafter_budget import with_drafter
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.machine_memory import read_machine_memory
from models.checkpoint import CheckpointFacts
from scheduler.ledger import KvCost
from scheduler.memory_plan import (
    ActivationShape,
    DoesNotFit,
    MemoryLimit,
    MemoryNeeds,
    MemoryPlan,
    plan_together,
)
from scheduler.step_policy import MAXIMUM_CHUNK

log = logging.getLogger("sparklane.models")

MINIMUM_ROW_TOKENS = 2048
"""A row at least this long must fit, unless the configuration asks for another length."""

_SLIDING_BLOCK = 8
_METAL_SHARE = 0.75
_BITS = {Precision.EIGHT_BIT: 8, Precision.FOUR_BIT: 4}
_GROUP_BITS = 32 / 64  # a scale and a bias of 16 bits for each 64 weights


class PlannedModel(NamedTuple):
    """A model that memory is planned for. `drafter` is the folder of its drafter, if any."""

    section: ModelSection
    facts: CheckpointFacts
    drafter: Path | None = None


class SettledPlans(NamedTuple):
    """The models as they can be served, and their plans, in the same order. `left_out` says why
    drafters that came with models are not among them, None = nothing is left out."""

    models: list[PlannedModel]
    plans: list[tuple[MemoryPlan, KvCost]]
    left_out: str | None = None


def plan_models(
    models: Sequence[PlannedModel], memory: MemorySection
) -> list[tuple[MemoryPlan, KvCost]]:
    """The plans of all models together, in their order."""
    on_gpu = has_gpu()
    needs = [needs_with_drafter(model, on_gpu=on_gpu) for model in models]
    limit = memory_limit(on_gpu=on_gpu)
    if memory.limit_bytes is not None:
        limit = MemoryLimit(memory.limit_bytes, "memory.limit_bytes")
    try:
        plans = plan_together(needs, limit, memory.reserve_bytes)
    except DoesNotFit as error:
        raise SparklaneError(str(error), ExitCode.CONFIGURATION) from error
    return [(plan, need.kv_cost) for plan, need in zip(plans, needs, strict=True)]


def settle(models: Sequence[PlannedModel], memory: MemorySection) -> SettledPlans:
    """How the models can be served.

    A drafter that came with a model and drafts where it pays is left out when memory has no room
    for it: nobody asked for it. Whatever else does not fit is refused.
    """
    try:
        return SettledPlans(list(models), plan_models(models, memory))
    except SparklaneError as error:
        plain = [_without_given_drafter(model) for model in models]
        if error.exit_code is not ExitCode.CONFIGURATION or plain == list(models):
            raise
        return SettledPlans(plain, plan_models(plain, memory), str(error))


def plan_with_drafters(
    models: Sequence[PlannedModel], memory: MemorySection
) -> tuple[list[PlannedModel], list[tuple[MemoryPlan, KvCost]]]:
    """The models as they can be served, and their plans: what `settle` finds, with a line in
    the log for what is left out."""
    settled = settle(models, memory)
    if settled.left_out is not None:
        log.warning("served without the drafter that came with the model: %s", settled.left_out)
    return settled.models, settled.plans


def _without_given_drafter(model: PlannedModel) -> PlannedModel:
    draft = model.section.draft
    return model._replace(drafter=None) if is_given(model.section.source, draft) else model


def context_length(section: ModelSection, facts: CheckpointFacts) -> int:
    """The longest row that a model is served with."""
    return min(facts.context_length, section.maximum_context or facts.context_length)


def model_needs(section: ModelSection, facts: CheckpointFacts, *, on_gpu: bool) -> MemoryNeeds:
    """What a model asks for, run as the configuration says."""
    weights, element = _weights(section.precision, facts, on_gpu=on_gpu)
    longest = context_length(section, facts)
    return MemoryNeeds(
        model=section.name,
        weight_bytes=weights,
        kv_cost=KvCost(
            bytes_per_token=facts.kv_bytes_per_token(element),
            bytes_per_row=facts.kv_window_bytes(element, _SLIDING_BLOCK),
        ),
        activations=_activations(facts.folder, scores=not on_gpu),
        element_bytes=element,
        chunk_tokens=MAXIMUM_CHUNK,
        maximum_rows=section.maximum_rows,
        context_length=longest,
        minimum_tokens=section.maximum_context or min(longest, MINIMUM_ROW_TOKENS),
    )


def needs_with_drafter(model: PlannedModel, *, on_gpu: bool) -> MemoryNeeds:
    """What a model and its drafter, if it has one, ask for together."""
    needs = model_needs(model.section, model.facts, on_gpu=on_gpu)
    draft = model.section.draft
    if model.drafter is None or draft is None:
        return needs
    bits = draft.bits or (4 if on_gpu else 16)
    return with_drafter(
        needs,
        model.drafter,
        bits=bits,
        group_size=draft.group_size,
        own_head=draft.own_head,
        shortlist=draft.shortlist,
        target_width=needs.weight_bytes / max(model.facts.parameters, 1),
    )


def has_gpu() -> bool:
    """Whether MLX will compute on a GPU here: always on Apple silicon, with CUDA if there."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    installed = {d.name.lower() for d in importlib.metadata.distributions() if d.name}
    return any(name.startswith("mlx-cuda") for name in installed) and Path("/dev/nvidia0").exists()


def memory_limit(*, on_gpu: bool) -> MemoryLimit:
    """What may be used now: the device's memory where it has its own, else the machine's."""
    if on_gpu and sys.platform != "darwin" and (free := _cuda_bytes()) is not None:
        return MemoryLimit(free, "the GPU")
    machine = read_machine_memory()
    available, source = machine.available, machine.limited_by
    if on_gpu and (share := int(machine.total * _METAL_SHARE)) < available:
        # Metal lets a process use about three quarters of the memory.
        available, source = share, "the GPU's share of memory"
    return MemoryLimit(available, source)


def _cuda_bytes() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _weights(precision: Precision, facts: CheckpointFacts, *, on_gpu: bool) -> tuple[int, int]:
    """Bytes of the weights as they will be held, and of one element of the caches."""
    if precision is Precision.AUTO and not on_gpu:
        precision = Precision.FLOAT32
    match precision:
        case Precision.AUTO:
            return facts.weight_bytes, 2
        case Precision.FLOAT32:
            return facts.float32_bytes, 4
        case Precision.BFLOAT16 | Precision.FLOAT16:
            return 2 * facts.parameters, 2
    bits = _BITS[precision]
    stored = facts.quantization is not None and facts.quantization.bits == bits
    packed = int(facts.parameters * (bits + _GROUP_BITS) / 8)
    # Scales and activations are float32 on the CPU, where 16 bits are slow.
    return (max(facts.weight_bytes, packed) if stored else packed), (2 if on_gpu else 4)


def _activations(folder: Path, *, scores: bool) -> ActivationShape:
    """The sizes of a forward, from config.json, which has been checked before."""
    raw: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    text = raw.get("text_config")
    config = {**raw, **text} if isinstance(text, dict) else raw

    def size(name: str, otherwise: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else otherwise

    hidden = size("hidden_size", 4096)
    return ActivationShape(
        hidden=hidden,
        intermediate=size("intermediate_size", 4 * hidden),
        attention_heads=size("num_attention_heads", 32),
        scores=scores,
    )
