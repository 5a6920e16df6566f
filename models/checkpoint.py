"""What a checkpoint folder holds, learnt before anything of it is loaded.

`inspect` reads `config.json`, `generation_config.json`, the shard index and the header of
every safetensors file, and returns facts that memory plans, listings and loaders share. It
is strict: a folder that passes has every tensor, whole, and runs no code of its own. Free of
mlx, blocking, any thread or process. Whatever the bytes are, the only exception is
`CheckpointError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from models.architecture import (
    ArchitectureError,
    Config,
    KvLayers,
    config_overrides,
    kv_layers,
)
from models.safetensors_header import HeaderError, TensorEntry, read_header

# Tensors of these modules are dropped when a multimodal checkpoint is loaded for text.
_NOT_TEXT = (
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "vision_embedder.",
)
_FETCH_AGAIN = "fetch the checkpoint again"


class CheckpointError(Exception):
    """A checkpoint cannot be used. Names the file, what is wrong with it, and the remedy."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How most quantized weights are packed. Single layers may differ."""

    bits: int
    group_size: int
    mode: str = "affine"


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint, in numbers. Bytes are exact, of the text model alone."""

    name: str
    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    vocabulary_size: int
    context_length: int
    """Positions the model was made for: prompt and generated tokens together."""
    stop_tokens: tuple[int, ...]
    parameters: int
    weight_bytes: int
    """Bytes of the weights as stored."""
    kv_layers: tuple[KvLayers, ...]
    quantization: Quantization | None
    precision: str
    """How the weights are stored: "4-bit", "bfloat16", "float32", ..."""
    config_overrides: dict[str, Any] = {}
    """Fields of config.json, respelled as mlx-lm reads them; to be laid over the file's."""

    @property
    def float32_bytes(self) -> int:
        """Bytes of the weights when every parameter is a float32."""
        return 4 * self.parameters

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one more token of context costs a row, for ever: full layers only."""
        full = (kinds for kinds in self.kv_layers if kinds.window is None)
        return element_bytes * sum(kinds.elements_per_token for kinds in full)

    def kv_window_bytes(self, element_bytes: int, extra_tokens: int = 0) -> int:
        """Bytes that a row's sliding windows cost when full, `extra_tokens` kept beyond each."""
        return element_bytes * sum(
            kinds.elements_per_token * (kinds.window + extra_tokens)
            for kinds in self.kv_layers
            if kinds.window is not None
        )


def inspect(folder: Path) -> CheckpointFacts:
    """Read and check a checkpoint folder.

    Raises:
        CheckpointError: the folder is no checkpoint, is incomplete, contradicts itself,
            asks for code of its own, or is of a kind that cannot be served.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    raw = _read_json(config_path, dict[str, Any])
    _refuse_code(folder, raw)
    config = _convert(config_path, raw)
    try:
        layers = kv_layers(config)
        overrides = config_overrides(config)
        vocabulary_size = config.require("vocab_size")
        context_length = config.context_length()
    except ArchitectureError as error:
        raise CheckpointError(config_path, str(error), error.remedy) from error
    tensors = {
        name: entry
        for name, entry in _read_tensors(folder).items()
        if not name.removeprefix("model.").startswith(_NOT_TEXT)
    }
    quantization = _quantization(config_path, raw)
    return CheckpointFacts(
        name=folder.resolve().name,
        folder=folder,
        model_type=config.model_type,
        architectures=config.architectures or (),
        vocabulary_size=vocabulary_size,
        context_length=context_length,
        stop_tokens=_stop_tokens(folder, config, vocabulary_size),
        parameters=_count_parameters(config_path, tensors, raw, quantization),
        weight_bytes=sum(entry.nbytes for entry in tensors.values()),
        kv_layers=layers,
        quantization=quantization,
        precision=_precision(tensors, quantization),
        config_overrides=overrides,
    )


def _read_json(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        remedy = "name a folder with config.json, tokenizer.json and safetensors files"
        raise CheckpointError(path, "not found", remedy) from error
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}", "make it readable") from (
            error
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"broken: {error}", _FETCH_AGAIN) from error


def _convert(path: Path, raw: dict[str, Any]) -> Config:
    """The fields that matter, typed; those of `text_config` over those around it."""
    text = raw.get("text_config")
    merged = {**raw, **text} if isinstance(text, dict) else raw
    merged = {**merged, "model_type": raw.get("model_type"), "raw": raw}
    try:
        return msgspec.convert(merged, type=Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(path, f"broken: {error}", _FETCH_AGAIN) from error


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    files = {"config.json": config}
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists():
        files[tokenizer.name] = _read_json(tokenizer, dict[str, Any])
    for name, content in files.items():
        for key in ("auto_map", "model_file"):
            if content.get(key):
                raise CheckpointError(
                    folder / name,
                    f"{key!r} asks to run Python code that came with the checkpoint",
                    "use a conversion without custom code; sparklane never runs it",
                )


def _read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the shards, checked against the index where there is one."""
    index_path = folder / "model.safetensors.index.json"
    index: dict[str, str] = {}
    if index_path.exists():
        index = _read_json(index_path, _ShardIndex).weight_map
        paths = sorted({folder / name for name in index.values()})
        for path in paths:
            if path.parent != folder or path.name in ("", ".", ".."):
                raise CheckpointError(index_path, f"names a file outside: {path}", _FETCH_AGAIN)
            if not path.is_file():
                raise CheckpointError(path, "missing, but the index names it", _FETCH_AGAIN)
    else:
        paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".gguf"))
        found = f" (there is {other[0]})" if other else ""
        remedy = "convert the checkpoint with mlx_lm.convert, or fetch it again"
        raise CheckpointError(folder, f"has no model*.safetensors{found}", remedy)
    tensors: dict[str, TensorEntry] = {}
    for path in paths:
        try:
            entries = read_header(path)
        except HeaderError as error:
            raise CheckpointError(path, str(error), _FETCH_AGAIN) from error
        if twice := tensors.keys() & entries.keys():
            raise CheckpointError(path, f"repeats the tensor {min(twice)!r}", _FETCH_AGAIN)
        tensors.update(entries)
    if missing := index.keys() - tensors.keys():
        problem = f"names {len(missing)} tensors that no shard has, such as {min(missing)!r}"
        raise CheckpointError(index_path, problem, _FETCH_AGAIN)
    if not tensors:
        raise CheckpointError(paths[0], "holds no tensors", _FETCH_AGAIN)
    return tensors


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _stop_tokens(folder: Path, config: Config, vocabulary_size: int) -> tuple[int, ...]:
    """Ends of text: generation_config.json's where it names any, else config.json's."""
    path = folder / "generation_config.json"
    chosen: int | list[int] | None = None
    if path.exists():
        chosen = _read_json(path, _GenerationConfig).eos_token_id
    if chosen is None:
        path, chosen = folder / "config.json", config.eos_token_id
    tokens = [chosen] if isinstance(chosen, int) else chosen or []
    for token in tokens:
        if not 0 <= token < vocabulary_size:
            problem = f"eos_token_id {token} is not in a vocabulary of {vocabulary_size} tokens"
            raise CheckpointError(path, problem, _FETCH_AGAIN)
    return tuple(dict.fromkeys(tokens))


def _quantization(path: Path, raw: dict[str, Any]) -> Quantization | None:
    found = raw.get("quantization")
    if found is None:
        return None
    try:
        result = msgspec.convert(found, type=Quantization)
    except msgspec.ValidationError as error:
        raise CheckpointError(path, f"broken quantization: {error}", _FETCH_AGAIN) from error
    if not (0 < result.bits <= 16 and 0 < result.group_size <= 1024):
        problem = f"quantization of {result.bits} bits in groups of {result.group_size}"
        raise CheckpointError(path, f"{problem} is not possible", _FETCH_AGAIN)
    return result


def _count_parameters(
    path: Path,
    tensors: dict[str, TensorEntry],
    raw: dict[str, Any],
    quantization: Quantization | None,
) -> int:
    """Parameters as the model has them: packed weights counted by what they unpack to."""
    total = 0
    for name, entry in tensors.items():
        layer, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{layer}.weight" in tensors:
            continue
        scales = tensors.get(f"{layer}.scales")
        if part != "weight" or scales is None or entry.dtype != "U32":
            total += entry.size
            continue
        if quantization is None:
            problem = f"does not say how {name!r} is quantized"
            raise CheckpointError(path, problem, "convert the checkpoint again")
        own = raw["quantization"].get(layer)
        try:
            packing = msgspec.convert(own, type=Quantization) if own else quantization
        except msgspec.ValidationError as error:
            problem = f"broken quantization of {layer!r}: {error}"
            raise CheckpointError(path, problem, _FETCH_AGAIN) from error
        count = scales.size * packing.group_size
        if entry.size * 32 != count * packing.bits:
            problem = (
                f"says that {name!r} has {packing.bits} bits in groups of {packing.group_size}, "
                "but its shape says otherwise"
            )
            raise CheckpointError(path, problem, "convert the checkpoint again")
        total += count
    return total


_PRECISIONS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}


def _precision(tensors: dict[str, TensorEntry], quantization: Quantization | None) -> str:
    """The precision that most bytes are stored in."""
    if quantization is not None:
        return f"{quantization.bits}-bit"
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    largest = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else "none"
    return _PRECISIONS.get(largest, largest.lower())
