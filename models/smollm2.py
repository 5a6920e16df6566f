"""Converts the GGUF of SmolLM2-135M-Instruct into a checkpoint folder that mlx-lm loads.

    python -m models.smollm2 GGUF OUT

Runs as a process of its own, so that its memory is given back and a failure harms nobody.
The weights stay as they are packed: 4 bits in groups of 32 (the embedding 8 bits), float16
scales and biases, float32 norms. Prints progress as JSON lines on stdout:
{"stage": "check", "done": BYTES, "total": BYTES}. OUT appears whole or not at all: files are
written into a hidden folder beside it, synced, and the folder renamed.

Fails with one line on stderr and exit code 65 when the GGUF is not the one that is known
(cut short, damaged, another model), 74 when OUT cannot be written (a full disk).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The only file this conversion knows. MLX's GGUF reader crashes on a damaged one, so the
# bytes are checked before it sees them.
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 4 << 20
_CONTROL_TOKEN = 3

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class GgufError(Exception):
    """The GGUF is not the file that this conversion knows."""


def convert(gguf: Path, out: Path) -> None:
    """Convert `gguf` into the folder `out`. An `out` that is already there is left alone.

    Raises:
        GgufError: `gguf` is cut short, damaged or another file.
        OSError: `gguf` cannot be read, or `out` cannot be written.
    """
    if out.exists():
        return
    check(gguf)
    weights, metadata = _load(gguf)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would hide the folder from a service's user
        _write(work / "model.safetensors", _serialized(weights, metadata), "write")
        for name, content in text_files(metadata).items():
            _write(work / name, content)
        _sync_folder(work)
        try:
            work.rename(out)
        except OSError as error:
            # Another conversion of the same file got there first: its result is the same.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_folder(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check(gguf: Path) -> None:
    """Compare length and SHA-256 with the known file's. Raises `GgufError` or `OSError`."""
    length = gguf.stat().st_size
    if length < GGUF_BYTES:
        raise GgufError(f"truncated: {length / 1e6:.0f} of {GGUF_BYTES / 1e6:.0f} MB")
    digest = hashlib.sha256()
    done = 0
    with gguf.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            _progress("check", done, length)
    if digest.hexdigest() != GGUF_SHA256:
        raise GgufError(f"checksum differs: sha256 {digest.hexdigest()}, not {GGUF_SHA256}")


def layer_name(name: str) -> str:
    """llama.cpp's name of a tensor as Hugging Face's: blk.0.attn_q.scales → model.layers..."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_PARTS[parts[2]]}.{parts[3]}"
    return f"{_OUTER_PARTS[parts[0]]}.{parts[1]}"


def unpermuted(rows: Any, heads: int) -> Any:
    """Undo llama.cpp's reordering of the output rows of q and k projections.

    llama.cpp interleaves the two halves of each head's rotary dimensions. Rows [heads·d, n]
    in, same out. Packed weights, scales and biases alike: groups run along the columns.
    """
    count, columns = rows.shape
    pairs = rows.reshape(heads, count // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(count, columns)


def text_files(metadata: dict[str, Any]) -> dict[str, bytes]:
    """The folder's JSON files by name, made from the GGUF's metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos, pad, unknown = (
        int(metadata[f"tokenizer.ggml.{name}_token_id"])
        for name in ("bos", "eos", "padding", "unknown")
    )
    special = {
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "unk_token": tokens[unknown],
    }
    packed = {"group_size": 32, "bits": 4, "mode": "affine"}
    context_length = int(metadata["llama.context_length"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": int(metadata["llama.embedding_length"]),
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": int(metadata["llama.attention.head_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": int(metadata["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "max_position_embeddings": context_length,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "float16",
        "quantization": {**packed, "model.embed_tokens": {**packed, "bits": 8}},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(metadata["tokenizer.ggml.add_space_prefix"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **special,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    generation_config = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": generation_config,
        "special_tokens_map.json": special,
        "tokenizer_config.json": tokenizer_config,
    }
    encoded = {name: _json(content) for name, content in files.items()}
    return {**encoded, "tokenizer.json": _tokenizer(metadata).encode()}


def _load(gguf: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # the conversion must also run where the GPU is busy
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    return loaded[0], loaded[1]


def _serialized(weights: dict[str, Any], metadata: dict[str, Any]) -> bytes:
    """The weights under their new names as the bytes of a safetensors file."""
    import numpy
    from safetensors.numpy import save

    heads = {
        "attn_q": int(metadata["llama.attention.head_count"]),
        "attn_k": int(metadata["llama.attention.head_count_kv"]),
    }
    tensors = {}
    for done, (name, array) in enumerate(weights.items(), start=1):
        value = numpy.array(array)
        part = name.split(".")[-2]
        if part in heads:
            value = unpermuted(value, heads[part])
        tensors[layer_name(name)] = numpy.ascontiguousarray(value)
        _progress("convert", done, len(weights))
    return save(tensors, metadata={"format": "mlx"})


def _tokenizer(metadata: dict[str, Any]) -> str:
    """tokenizer.json: byte-level BPE that splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise GgufError(f"tokenizer.ggml.pre is {kind!r}, not 'smollm'")
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return str(tokenizer.to_str(pretty=True))


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes, stage: str | None = None) -> None:
    with path.open("wb") as file:
        for start, chunk in _chunks(content):
            file.write(chunk)
            if stage is not None:
                _progress(stage, start + len(chunk), len(content))
        file.flush()
        os.fsync(file.fileno())


def _chunks(content: bytes) -> Iterator[tuple[int, memoryview]]:
    view = memoryview(content)
    for start in range(0, len(view), _CHUNK):
        yield start, view[start : start + _CHUNK]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _progress(stage: str, done: int, total: int) -> None:
    print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)


def _stop(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)  # unwinds, so that the hidden folder is removed


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if len(arguments) != 2:
        print("usage: python -m models.smollm2 GGUF OUT", file=sys.stderr)
        return os.EX_USAGE
    signal.signal(signal.SIGTERM, _stop)
    gguf, out = Path(arguments[0]), Path(arguments[1])
    try:
        convert(gguf, out)
    except GgufError as error:
        print(f"{gguf}: {error}; fetch the file again", file=sys.stderr)
        return os.EX_DATAERR
    except OSError as error:
        where = error.filename or out
        print(
            f"{where}: {error.strerror}; free space or choose a folder that can be written",
            file=sys.stderr,
        )
        return os.EX_IOERR
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
