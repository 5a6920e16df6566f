"""Leads each generation to its model, and none any more once the daemon drains.

Owns the models by name and the draining state; runs on the daemon's event loop. This is what
the HTTP side sees as `daemon.generation.Dispatcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType

from daemon.generation import Delta, Generation, Refusal, RefusalKind, ServedModel
from daemon.metrics import Metrics
from daemon.model_service import ModelService


class ModelDispatcher:
    """The models that this daemon serves."""

    def __init__(self, services: Sequence[ModelService], metrics: Metrics) -> None:
        self._services = {service.name: service for service in services}
        self._metrics = metrics
        self._draining = False

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """What is served, by name."""
        return MappingProxyType(self._services)

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping."""
        return self._draining

    @property
    def wedged(self) -> bool:
        """Whether an engine has work and has not ended a step for too long."""
        return any(
            service.supervisor is not None and service.supervisor.wedged
            for service in self._services.values()
        )

    def generate(self, generation: Generation) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """See `daemon.generation.Dispatcher.generate`."""
        service = self._services.get(generation.model)
        if service is None:
            self._metrics.refused_unknown_model()
            known = ", ".join(self._services)
            message = f"the model {generation.model!r} is not served here; there are: {known}"
            return _refusing(Refusal(RefusalKind.UNKNOWN_MODEL, message))
        if self._draining:
            message = "the daemon is stopping and takes no new requests; try again later"
            return _refusing(service.refused(RefusalKind.DRAINING, message, 10.0))
        return service.generate(generation)

    async def drain(self, grace_seconds: float) -> bool:
        """Take nothing new; give what has been accepted so long, then end it with a refusal.

        Returns whether everything came to its end.
        """
        self._draining = True
        services = list(self._services.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                for service in services:
                    await service.until_idle()
                return True
        for service in services:
            message = (
                "the daemon has stopped before the answer was complete: it did not end within "
                f"server.grace_seconds, which is {grace_seconds:g}"
            )
            service.refuse_all(RefusalKind.DRAINING, message, None)
        return False


@contextlib.asynccontextmanager
async def _refusing(refusal: Refusal) -> AsyncIterator[AsyncIterator[Delta]]:
    raise refusal
    yield
