"""`bench http`: one load on a server that is already running.

Runs on the benchmark's event loop. A server that does not answer at all raises
`SparklaneError`; requests that it fails are counted.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from daemon.bench.http_load import HttpTarget, connections, first_model, run_load
from daemon.bench.prompts import prompt
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import LoadSummary, summarise
from daemon.exit_codes import ExitCode, SparklaneError


class HttpResult(msgspec.Struct, frozen=True, kw_only=True):
    """The load and where it was sent."""

    machine: Machine
    url: str
    model: str
    concurrency: int
    max_tokens: int
    load: LoadSummary


async def measure(
    url: str,
    model: str | None,
    api_key: str | None,
    *,
    concurrency: int,
    requests: int,
    max_tokens: int,
    prompt_tokens: int,
    ignore_eos: bool,
    progress: Callable[[str], None],
) -> HttpResult:
    """Send `requests` prompts of roughly `prompt_tokens` words, `concurrency` at a time."""
    machine = this_machine()
    async with connections() as client:
        target = HttpTarget(
            url=url,
            model=model or await _listed(client, url, api_key),
            api_key=api_key,
            extra={"ignore_eos": True} if ignore_eos else {},
        )
        progress(f"{requests} requests, {concurrency} at a time")
        prompts = [prompt(prompt_tokens, number) for number in range(requests)]
        timings = await run_load(
            client, target, prompts, concurrency=concurrency, max_tokens=max_tokens
        )
    return HttpResult(
        machine=machine,
        url=url,
        model=target.model,
        concurrency=concurrency,
        max_tokens=max_tokens,
        load=summarise(timings),
    )


async def _listed(client: aiohttp.ClientSession, url: str, api_key: str | None) -> str:
    try:
        return await first_model(client, url, api_key)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise SparklaneError(
            f"{url} does not list its models ({error}); check --url, or name one with --model",
            ExitCode.NETWORK,
        ) from error
