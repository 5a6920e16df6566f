"""The models of one daemon, from their names in the configuration to running engines.

Owns the services, their supervisors and the supervisors' tasks; runs on the event loop. All
checkpoints are found before any engine starts, because their memory is planned together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from daemon.configuration import Configuration, ModelSection, reloadable_changes
from daemon.dispatcher import ModelDispatcher
from daemon.draft_section import AcceptanceRule, DraftSection, SpeculationMode
from daemon.engine_health import EngineLimits
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.fetch import fetched
from daemon.generation import ModelState
from daemon.locations import made
from daemon.memory_budget import PlannedModel, context_length, plan_with_drafters
from daemon.metrics import Metrics
from daemon.model_service import ModelRoom, ModelService
from daemon.supervisor import STOP_SECONDS, Supervisor
from models.checkpoint import CheckpointError, inspect
from scheduler.admission import QueueLimits
from scheduler.ledger import CacheRoom
from scheduler.messages import Configure, DraftConfigure

log = logging.getLogger("sparklane.models")


class ServedModels:
    """Everything between the configuration and the HTTP side."""

    def __init__(
        self,
        configuration: Configuration,
        cache: Path,
        version: str,
        engine_command: Sequence[str] | None = None,
    ) -> None:
        self.configuration = configuration
        self._cache = cache
        self._engine_command = engine_command
        self.metrics = Metrics(version)
        self.services = [ModelService(model.name, self.metrics) for model in configuration.models]
        self.dispatcher = ModelDispatcher(self.services, self.metrics)
        self._supervising: dict[str, asyncio.Task[None]] = {}

    async def bring_up(self) -> None:
        """Find or fetch every checkpoint, plan the memory of all, start the engines."""
        found = [await self._find(section) for section in self.configuration.models]
        models, plans = await asyncio.to_thread(
            plan_with_drafters, found, self.configuration.memory
        )
        limits = _queue_limits(self.configuration)
        for service, planned, (plan, cost) in zip(self.services, models, plans, strict=True):
            model, facts, drafter = planned
            room = ModelRoom(
                maximum_rows=model.maximum_rows,
                kv_budget=plan.kv_budget,
                kv_cost=cost,
                context_length=context_length(model, facts),
            )
            service.open(facts.folder, room, limits)
            service.supervisor = Supervisor(
                model.name,
                Configure(
                    checkpoint=str(facts.folder),
                    precision=model.precision.value,
                    maximum_rows=model.maximum_rows,
                    prefill_milliseconds=model.prefill_milliseconds,
                    draft=self._draft_of(model.draft, drafter),
                    room=CacheRoom(budget=plan.kv_budget, cost=cost),
                ),
                service,
                made(self._cache / "run"),
                _engine_limits(self.configuration),
                command=self._engine_command,
            )
            self._supervise(service)

    async def _find(self, section: ModelSection) -> PlannedModel:
        folder = await fetched(section.source, self._cache)
        drafter, draft = None, section.draft
        if draft is not None and draft.speculation is not SpeculationMode.OFF:
            # The configuration has seen to it that a model that drafts has a drafter.
            assert draft.checkpoint is not None
            drafter = await fetched(draft.checkpoint, self._cache)
        try:
            facts = await asyncio.to_thread(inspect, folder)
        except CheckpointError as error:
            raise SparklaneError(str(error), ExitCode.CHECKPOINT) from error
        return PlannedModel(section, facts, drafter)

    def _draft_of(self, draft: DraftSection | None, drafter: Path | None) -> DraftConfigure | None:
        if draft is None or drafter is None:
            return None
        return DraftConfigure(
            drafter=str(drafter),
            bits=draft.bits,
            group_size=draft.group_size,
            own_head=draft.own_head,
            shortlist=draft.shortlist,
            always=draft.speculation is SpeculationMode.ALWAYS,
            maximum_draft_tokens=draft.maximum_tokens,
            confidence_threshold=draft.confidence_threshold,
            rejection=draft.acceptance is AcceptanceRule.REJECTION,
            costs_folder=str(self._cache / "costs"),
        )

    def applicable(self, new: Configuration) -> Configuration:
        """The present configuration with what can be changed while serving taken from `new`."""
        return reloadable_changes(self.configuration, new)[0]

    def take_over(self, new: Configuration) -> None:
        """Apply what a reloaded configuration can change, and try again what is down."""
        self.configuration, kept = reloadable_changes(self.configuration, new)
        for service in self.services:
            service.set_queue_limits(_queue_limits(self.configuration))
            if service.state is ModelState.DOWN and service.supervisor is not None:
                log.info("%s is tried again", service.name)
                service.problem = None
                self._supervise(service)
        if kept:
            log.warning("these changes need a restart: %s", ", ".join(kept))
        log.info("the configuration was reloaded")

    async def stop(self, *, at_once: bool) -> None:
        """Ask every engine to end, unless it must be `at_once`, and see to it that it does."""
        for service in self.services:
            if service.supervisor is not None:
                service.supervisor.stop(0.0 if at_once else STOP_SECONDS)
        await asyncio.gather(*self._supervising.values(), return_exceptions=True)

    def _supervise(self, service: ModelService) -> None:
        assert service.supervisor is not None
        self._supervising[service.name] = asyncio.create_task(service.supervisor.run())


def _queue_limits(configuration: Configuration) -> QueueLimits:
    queue = configuration.queue
    return QueueLimits(requests=queue.requests, prompt_tokens=queue.prompt_tokens)


def _engine_limits(configuration: Configuration) -> EngineLimits:
    engine = configuration.engine
    return EngineLimits(
        load=engine.load_seconds,
        wedge=engine.wedge_seconds,
        heartbeat=engine.heartbeat_seconds,
        maximum_restarts=engine.maximum_restarts,
        restart_window=engine.restart_window_seconds,
    )
