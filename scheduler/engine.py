"""The engine process: `python -m scheduler.engine --socket PATH`.

Owns MLX on its main thread. The first frame from the daemon says what to load; from then on
the step loop runs. Exit codes: 0 after `Shutdown` or when the daemon has gone, 65 when the
checkpoint cannot be used (a restart cannot mend that), 70 for anything else (it may).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from models import blas, cuda_settings
from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError
from scheduler.engine_link import EngineLink
from scheduler.messages import PROTOCOL_VERSION, Configure, Fault, Loading, Ready
from scheduler.step_policy import StepPolicy

log = logging.getLogger("sparklane.engine")


def main() -> int:
    """Connect, load, serve. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="scheduler.engine", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket of the daemon")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    # A terminal's Ctrl-C reaches the whole process group; only the daemon decides to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(arguments.socket)
    try:
        return _serve(link)
    except (CheckpointError, DrafterError) as error:
        link.send(Fault(str(error), restartable=False))
        return os.EX_DATAERR
    except Exception as error:
        log.exception("the engine stops")
        link.send(Fault(f"{type(error).__name__}: {error}", restartable=True))
        return os.EX_SOFTWARE
    finally:
        link.close()


def _serve(link: EngineLink) -> int:
    configure = link.receive(wait=True)
    if not isinstance(configure, Configure):
        return os.EX_OK
    if configure.protocol != PROTOCOL_VERSION:
        words = f"the daemon speaks protocol {configure.protocol}, this engine {PROTOCOL_VERSION}"
        link.send(Fault(f"{words}: restart the daemon after an upgrade", restartable=False))
        return os.EX_PROTOCOL
    started = time.perf_counter()
    link.send(Loading("load"))
    cuda_settings.prepare(growing_keys=True)
    blas_name = blas.load()

    # MLX takes its BLAS from what the process has loaded when it is first imported.
    from models.backend import device_kind, device_name
    from models.target import Target
    from scheduler.speculation import load_pair
    from scheduler.step_loop import StepLoop
    from scheduler.warm import warm

    target = Target.load(Path(configure.checkpoint), configure.precision)
    policy = StepPolicy(configure.prefill_milliseconds / 1000.0)
    link.send(Loading("warm"))
    warm(target, policy.pace)
    pair = None
    if configure.draft is not None:
        link.send(Loading("drafter"))
        pair = load_pair(
            target,
            configure.draft,
            maximum_rows=configure.maximum_rows,
            room=configure.room,
            blas=blas_name,
            progress=lambda share: link.send(Loading(f"measure {share:.0%}")),
        )
    loop = StepLoop(target, pair, link, policy)
    link.start_heartbeat(loop.heartbeat)
    link.send(
        Ready(
            backend=device_kind(),
            device=device_name(),
            precision=target.precision,
            blas=blas_name,
            vocabulary_size=target.vocabulary_size,
            context_length=target.facts.context_length,
            maximum_rows=configure.maximum_rows,
            kv_bytes_per_token=target.kv_bytes_per_token,
            weight_bytes=target.weight_bytes,
            load_seconds=time.perf_counter() - started,
            drafter_bytes=pair.drafter.weight_bytes if pair else 0,
            draft_context_bytes_per_token=pair.drafter.context_bytes_per_token if pair else 0,
        )
    )
    loop.run()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
