"""Which drafters load, and what is said of those that do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models.dspark.configuration import (
    DrafterError,
    Family,
    HeadKind,
    check_fit,
    parse_configuration,
)
from models.dspark.drafter import Drafter, DraftNetwork
from models.dspark.loader import load_drafter, quantize, save_drafter

from .pairs import FAMILIES, FIXTURES, goldens, make_drafter, shape, target

Config = dict[str, Any]
Weights = dict[str, mx.array]


def config(family: str) -> Config:
    parsed: Config = json.loads((FIXTURES / family / "drafter" / "config.json").read_text())
    return parsed


def altered(
    folder: Path,
    family: str,
    *,
    settings: Config | None = None,
    weights: Callable[[Weights], Weights] | None = None,
) -> Path:
    """A copy of a reference drafter with other settings or tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(family) | (settings or {})))
    source = FIXTURES / family / "drafter" / "model.safetensors"
    if weights is None:
        shutil.copyfile(source, folder / "model.safetensors")
    else:
        loaded = mx.load(str(source))
        assert isinstance(loaded, dict)
        mx.save_safetensors(str(folder / "model.safetensors"), weights(loaded))
    return folder


def load(folder: Path, family: str, **options: Any) -> Drafter:
    return load_drafter(folder, target(family), shape(family), **options)


def first_draft(drafter: Drafter, family: str) -> tuple[list[int], mx.array | None]:
    recorded = goldens(family)
    features = recorded["round0.context_features"][None]
    context = drafter.new_context()
    context.open_row()
    drafter.extend(context, features)
    context.advance([features.shape[1]])
    draft = drafter.draft(context, recorded["round0.draft_input_ids"][:1])
    tokens: list[int] = draft.tokens[0].tolist()
    return tokens, draft.confidence_logits


class TestConfiguration:
    def test_the_family_is_told_by_architectures_alone(self) -> None:
        for model_type in ("gemma4_text", "gemma4_unified_text", "llama"):
            parsed = parse_configuration(config("gemma4") | {"model_type": model_type})
            assert parsed.family is Family.GEMMA4
        with pytest.raises(DrafterError, match="ordinary model"):
            parse_configuration(config("qwen3") | {"architectures": ["Qwen3ForCausalLM"]})

    def test_head_sizes_folded_into_layers(self) -> None:
        folded = config("gemma4")
        dim, heads = folded.pop("global_head_dim"), folded.pop("num_global_key_value_heads")
        folded["per_layer_config"] = {
            str(layer): {"head_dim": dim, "num_key_value_heads": heads} for layer in (5, 11)
        }
        plain, parsed = parse_configuration(config("gemma4")), parse_configuration(folded)
        assert (parsed.head_dim, parsed.key_value_heads) == (64, 1)
        assert (parsed.head_dim, parsed.key_value_heads) == (
            plain.head_dim,
            plain.key_value_heads,
        )

    def test_layers_of_unequal_heads_are_refused(self) -> None:
        folded = config("gemma4")
        del folded["global_head_dim"]
        folded["per_layer_config"] = {"0": {"head_dim": 64}, "1": {"head_dim": 32}}
        with pytest.raises(DrafterError, match=r"head_dim as \[32, 64\]"):
            parse_configuration(folded)

    def test_only_the_full_attention_rope_counts(self) -> None:
        parsed = parse_configuration(config("gemma4"))
        assert parsed.rope_theta == 1e6
        assert parsed.rope["rope_type"] == "proportional"

    def test_rope_of_older_files(self) -> None:
        old = config("qwen3")
        del old["rope_parameters"]
        old["rope_theta"] = 5e5
        parsed = parse_configuration(old)
        assert (parsed.rope_theta, parsed.rope["rope_type"]) == (5e5, "default")

    def test_the_published_gemma_file(self) -> None:
        published = config("gemma4") | {
            "hidden_size": 3840,
            "global_head_dim": 512,
            "head_dim": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "target_layer_ids": [5, 17, 29, 41, 46],
            "num_target_layers": 48,
            "markov_rank": 256,
        }
        parsed = parse_configuration(published)
        assert (parsed.head_dim, parsed.key_value_heads, parsed.query_heads) == (512, 1, 16)
        assert parsed.tap_width == 5 * 3840
        assert parsed.head_kind is HeadKind.VANILLA

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block_size": None}, "block_size is None"),
            ({"target_layer_ids": 3}, "target_layer_ids is 3"),
            ({"markov_head_type": "lstm"}, "vanilla, gated and rnn"),
            ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
            ({"layer_types": ["sliding_attention"] * 2}, "attend in full"),
            ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ],
    )
    def test_what_is_missing_or_unknown_is_named(self, change: Config, message: str) -> None:
        with pytest.raises(DrafterError, match=message):
            parse_configuration(config("qwen3") | change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"vocab_size": 513}, "vocabulary is 513, the target's is 512"),
            ({"hidden_size": 64}, "hidden size is 64"),
            ({"num_target_layers": 6}, "number of target layers is 6"),
            ({"target_layer_ids": [0, 1, 4]}, "last layer 4"),
            ({"target_layer_ids": [0, 1, 9]}, "outside the target's layers 0 to 4"),
            ({"target_layer_ids": [-1, 1, 3]}, "outside"),
            ({"target_layer_ids": [1, 0, 3]}, "strictly increasing"),
            ({"target_layer_ids": []}, "strictly increasing"),
            ({"mask_token_id": 512}, "mask_token_id 512 is outside"),
            ({"eos_token_id": 3}, "their tokenizers differ"),
            ({"bos_token_id": 3}, "their tokenizers differ"),
        ],
    )
    def test_what_does_not_fit_the_target_is_refused(self, change: Config, message: str) -> None:
        with pytest.raises(DrafterError, match=message):
            check_fit(parse_configuration(config("qwen3") | change), shape("qwen3"))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_its_own_target_fits(self, family: str) -> None:
        check_fit(parse_configuration(config(family)), shape(family))


def published(family: str, **settings: Any) -> DraftNetwork:
    """A network of a published drafter's shape. Nothing is evaluated, so nothing is allocated."""
    parsed = parse_configuration(config(family) | {"markov_rank": 256, **settings})
    network = DraftNetwork(parsed, own_head=True)
    network.set_dtype(mx.bfloat16)
    return network


GEMMA_12B = {
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "global_head_dim": 512,
    "num_attention_heads": 16,
    "target_layer_ids": [5, 17, 29, 41, 46],
}


def qwen(hidden: int, intermediate: int, heads: int) -> Config:
    return {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "head_dim": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }


@pytest.mark.parametrize(
    ("family", "settings", "parameters", "tensors"),
    [
        ("gemma4", GEMMA_12B, 3_430_444_550, 74),
        ("qwen3", qwen(2560, 9728, 32), 1_393_133_569, 64),
        ("qwen3", qwen(4096, 12288, 32), 2_371_081_729, 64),
        ("qwen3", qwen(5120, 17408, 40), 3_416_263_169, 64),
    ],
    ids=["gemma 12b", "qwen 4b", "qwen 8b", "qwen 14b"],
)
def test_the_published_drafters_have_as_many_parameters(
    family: str, settings: Config, parameters: int, tensors: int
) -> None:
    flat = tree_flatten(published(family, **settings).parameters())
    assert len(flat) == tensors
    assert sum(value.size for _, value in flat) == parameters


def test_the_published_gemma_drafter_takes_less_than_0_9_gb_at_4_bits() -> None:
    network = published("gemma4", **GEMMA_12B)
    del network["embed_tokens"], network["lm_head"]
    quantize(network, 4, 64)
    assert sum(value.nbytes for _, value in tree_flatten(network.parameters())) < 0.9e9


@pytest.mark.parametrize("family", FAMILIES)
class TestHeadBinding:
    def test_the_targets_head_is_borrowed_and_gives_the_same_drafts(self, family: str) -> None:
        borrowed, own = make_drafter(family), make_drafter(family, own_head=True)
        names = {name for name, _ in tree_flatten(borrowed.network.parameters())}
        assert not any(name.startswith(("embed_tokens", "lm_head")) for name in names)
        assert own.weight_bytes - borrowed.weight_bytes == 2 * 512 * 128 * 4
        assert first_draft(borrowed, family)[0] == first_draft(own, family)[0]

    def test_a_checkpoint_without_a_head_cannot_keep_its_own(
        self, family: str, tmp_path: Path
    ) -> None:
        def without_head(weights: Weights) -> Weights:
            return {n: v for n, v in weights.items() if "embed_tokens" not in n}

        folder = altered(tmp_path / "drafter", family, weights=without_head)
        assert load(folder, family).block_size == 7
        with pytest.raises(DrafterError, match="asked to use its own head"):
            load(folder, family, own_head=True)


@pytest.mark.parametrize("family", FAMILIES)
class TestQuantization:
    @pytest.mark.parametrize("bits", [4, 8])
    def test_everything_but_the_confidence_head(self, family: str, bits: int) -> None:
        drafter = make_drafter(family, bits=bits, own_head=True)
        for path, module in drafter.network.named_modules():
            if path.startswith("confidence_head.proj"):
                assert module.weight.dtype == mx.float32 and not hasattr(module, "bits")
            elif "weight" in module and module.weight.ndim == 2:
                assert module.bits == bits and module.group_size == 64, path

    def test_sixteen_bits_change_nothing(self, family: str) -> None:
        assert make_drafter(family, bits=16).weight_bytes == make_drafter(family).weight_bytes

    @pytest.mark.parametrize("own_head", [False, True])
    def test_saved_and_loaded_again(self, family: str, own_head: bool, tmp_path: Path) -> None:
        drafter = make_drafter(family, bits=4, group_size=32, own_head=own_head)
        save_drafter(drafter, tmp_path / "saved")
        again = load(tmp_path / "saved", family, own_head=own_head)
        assert again.weight_bytes == drafter.weight_bytes
        before, after = first_draft(drafter, family), first_draft(again, family)
        assert before[0] == after[0]
        assert before[1] is not None and after[1] is not None
        assert mx.array_equal(before[1], after[1])

    def test_unsuitable_settings_are_refused(self, family: str) -> None:
        with pytest.raises(DrafterError, match="bits is 3"):
            make_drafter(family, bits=3)
        with pytest.raises(DrafterError, match="groups of 128 do not divide"):
            make_drafter(family, bits=4, group_size=128)


class TestCheckpoint:
    def test_shards(self, tmp_path: Path) -> None:
        folder = altered(tmp_path / "drafter", "gemma4")
        loaded = mx.load(str(folder / "model.safetensors"))
        assert isinstance(loaded, dict)
        names = sorted(loaded)
        parts = {"a.safetensors": names[:13], "b.safetensors": names[13:]}
        for file, part in parts.items():
            mx.save_safetensors(str(folder / file), {name: loaded[name] for name in part})
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "model.safetensors").unlink()
        assert first_draft(load(folder, "gemma4"), "gemma4")[0] == (
            goldens("gemma4")["round0.tokens"].tolist()
        )
        (folder / "b.safetensors").unlink()
        with pytest.raises(DrafterError, match=r"b\.safetensors"):
            load(folder, "gemma4")

    def test_dflash(self, tmp_path: Path) -> None:
        def headless(weights: Weights) -> Weights:
            return {
                name: value
                for name, value in weights.items()
                if not name.startswith(("markov_head", "confidence_head"))
            }

        folder = altered(
            tmp_path / "drafter",
            "qwen3",
            settings={"markov_rank": 0, "enable_confidence_head": False},
            weights=headless,
        )
        drafter = load(folder, "qwen3")
        tokens, confidence = first_draft(drafter, "qwen3")
        base = goldens("qwen3")["round0.base_logits"]
        assert tokens == mx.argmax(base, axis=-1).tolist()
        assert confidence is None
        assert drafter.configuration.head_kind is HeadKind.NONE

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"markov_rank": 32}, "markov_head.markov_w1.weight has the shape"),
            ({"markov_head_type": "gated"}, "lacks markov_head.gate_proj.bias"),
            ({"markov_rank": 0}, "markov_head.markov_w1.weight"),
            ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "does not account for"),
            ({"head_dim": 32}, "has the shape"),
        ],
    )
    def test_tensors_that_do_not_match_the_settings(
        self, settings: Config, message: str, tmp_path: Path
    ) -> None:
        folder = altered(tmp_path / "drafter", "qwen3", settings=settings)
        with pytest.raises(DrafterError, match=message):
            load(folder, "qwen3")

    def test_a_torn_file(self, tmp_path: Path) -> None:
        folder = altered(tmp_path / "drafter", "qwen3")
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(DrafterError, match=r"model\.safetensors.*Fetch the drafter again"):
            load(folder, "qwen3")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match=r"config\.json cannot be read"):
            load(tmp_path, "qwen3")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(DrafterError, match="not JSON"):
            load(tmp_path, "qwen3")
