"""What MLX computes on here: `python -m models.backend_report CACHE`.

A child process of whoever must not import mlx. Computes something, so that a library that does
not work is found out, and prints {"backend", "device", "blas"} as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from models import blas


def main() -> None:
    """Print the report; an exception means that MLX does not work."""
    chosen = blas.load(Path(sys.argv[1]))

    # MLX takes its BLAS from what the process has loaded when it is first imported.
    import mlx.core as mx

    from models.backend import DeviceKind, device_kind, device_name

    kind = device_kind()
    names = {DeviceKind.CPU: "CPU", DeviceKind.CUDA: "CUDA", DeviceKind.METAL: "Metal"}
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    device = "" if kind is DeviceKind.CPU else device_name()
    print(json.dumps({"backend": names[kind], "device": device, "blas": chosen}))


if __name__ == "__main__":
    main()
