"""What a drafter adds to a model's memory, from its files alone.

Pure but for reading headers; runs before the engines start. Raises `SparklaneError` for a
drafter that cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from daemon.exit_codes import ExitCode, SparklaneError
from models.dspark.configuration import DrafterError, read_configuration
from models.dspark.shortlist import FILE_NAME, stored_size
from models.safetensors_header import HeaderError, TensorEntry, read_header
from scheduler.ledger import KvCost
from scheduler.memory_plan import MemoryNeeds

_BORROWED = ("embed_tokens", "lm_head")
_SHORTENED = "markov_head.markov_w2."
_GROUP_BITS = 32


def with_drafter(
    needs: MemoryNeeds,
    folder: Path,
    *,
    bits: int,
    group_size: int,
    own_head: bool,
    shortlist: bool,
    target_width: float,
) -> MemoryNeeds:
    """The needs of a model that has the drafter in `folder` beside it.

    `bits` 16 means the precision of the target's caches. Every row's context costs as much per
    token as another few layers of cache. With a `shortlist` the drafter keeps copies of the
    head's rows, at the `target_width` bytes a weight of the target's unless the head is its own,
    and of its Markov output matrix only the shortlist's rows.
    """
    try:
        configuration = read_configuration(folder)
        files = [file for file in sorted(folder.glob("*.safetensors")) if file.name != FILE_NAME]
        headers = [read_header(file) for file in files]
        short = stored_size(folder) if shortlist else None
    except (DrafterError, HeaderError, OSError) as error:
        raise SparklaneError(f"the drafter in {folder}: {error}", ExitCode.CHECKPOINT) from error
    stored = int((configuration.quantization or {}).get("group_size", 0))
    parameters = sum(
        _parameters(header, stored, own_head=own_head, short=short) for header in headers
    )
    width = needs.element_bytes if bits == 16 else bits / 8 + _GROUP_BITS / group_size / 8
    copied = (short or 0) * configuration.hidden_size * (width if own_head else target_width)
    context = 2 * configuration.layer_count * configuration.key_value_heads
    context *= configuration.head_dim * needs.element_bytes
    return msgspec.structs.replace(
        needs,
        weight_bytes=needs.weight_bytes + int(parameters * width + copied),
        kv_cost=KvCost(
            bytes_per_token=needs.kv_cost.bytes_per_token + context,
            bytes_per_row=needs.kv_cost.bytes_per_row,
        ),
    )


def _parameters(
    header: Mapping[str, TensorEntry], stored: int, *, own_head: bool, short: int | None
) -> int:
    """Parameters of a file; those of packed weights are told by their scales, one for each
    group of `stored`. `short` is how many rows of the Markov output matrix are kept."""
    count = 0
    for name, entry in header.items():
        if not own_head and name.split(".", 1)[0] in _BORROWED:
            continue
        size = entry.size
        if short is not None and name.startswith(_SHORTENED) and entry.shape[0] > 0:
            size = size // entry.shape[0] * min(short, entry.shape[0])
        if stored and name.endswith(".scales"):
            count += size * stored
        elif not (stored and (entry.dtype == "U32" or name.endswith(".biases"))):
            count += size
    return count
