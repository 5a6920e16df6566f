"""The drafter workshop: data from the target itself, training, calibration, measurement.

Each step is a module with a `main`, run as `python -m models.workshop.<step>` in a process of
its own. Steps print their progress as JSON lines and leave everything else in a run folder.
"""

import sys

from models import blas, cuda_settings

# While a package is imported on behalf of `python -m`, that is what argv begins with. The steps
# import mlx at their top, and the BLAS has to be chosen before.
if sys.argv[:1] == ["-m"] and "mlx.core" not in sys.modules:
    cuda_settings.prepare(growing_keys=False)
    blas.load()
