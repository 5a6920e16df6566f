"""Small corpora of the tiny reference target's own alphabet."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.workshop.corpus import Conversation, CorpusWriter
from models.workshop.run_folder import fingerprint
from tests.dspark.pairs import FIXTURES

TARGET = FIXTURES / "qwen3" / "target"


def write_corpus(folder: Path, count: int = 24, seed: int = 5) -> Path:
    """Conversations of random tokens, of 20 to 90 tokens each."""
    random = np.random.default_rng(seed)
    writer = CorpusWriter(folder, {"fingerprint": fingerprint(TARGET), "seed": seed}, 512)
    conversations = []
    for _ in range(count):
        size = int(random.integers(20, 90))
        conversations.append(Conversation(random.integers(5, 500, size).tolist(), 8))
    writer.write(conversations[: count // 2])
    writer.write(conversations[count // 2 :])
    return folder
