"""Decoding both ways, measuring, and the forms a drafter is written in."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from models.checkpoint import inspect
from models.dspark.configuration import DrafterError
from models.sampling_settings import Sampling
from models.target import Target
from models.workshop import export, measurement, quantize_report, round_costs
from models.workshop.chat_text import ChatText
from models.workshop.dequantized import dequantize_network
from models.workshop.figures import acceptance, divergences
from models.workshop.quantization import Recipe, quantize_by_recipe
from models.workshop.speculation import Answer, Decoder, Round
from tests.dspark.pairs import FIXTURES, make_drafter, target
from tests.workshop.corpora import TARGET

DRAFTER = FIXTURES / "qwen3" / "drafter"


@functools.cache
def _target() -> Target:
    return Target(inspect(TARGET), target("qwen3"), "float32")


def _trace() -> list[dict[str, Any]]:
    trace = json.loads((FIXTURES / "qwen3" / "trace_float32_thr0.json").read_text())
    prompts: list[dict[str, Any]] = trace["prompts"]
    return prompts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_say_the_same_with_and_without_a_drafter(temperature: float) -> None:
    decoder = Decoder(_target(), make_drafter("qwen3", dtype=mx.float32))
    prompts = [prompt["prompt_ids"] for prompt in _trace()[:4]]
    settings = [Sampling(temperature=temperature, seed=seed) for seed in range(4)]
    try:
        serial = decoder.serial(prompts, settings, 20).answers
        speculative = decoder.speculative(prompts, settings, 20).answers
    finally:
        decoder.close()
    assert [one.tokens for one in serial] == [one.tokens for one in speculative]
    assert not divergences(serial, speculative)
    assert all(len(one.margins) == len(one.tokens) for one in serial)
    assert acceptance(speculative, 7)["tau"] > 1.5
    if temperature == 0:
        for answer, prompt in zip(serial, _trace(), strict=False):
            assert answer.tokens == prompt["output_ids"][:20]


def test_figures_of_rounds() -> None:
    rounds = [
        Round(0, 3, 3, [], False),
        Round(4, 3, 1, [], False),
        Round(6, 3, 0, [], False),
        Round(7, 3, 2, [], True),
    ]
    figures = acceptance([Answer([1] * 8, rounds, [])], 3)
    assert figures["tau"] == pytest.approx(7 / 3)
    assert figures["tau_by_position"] == [0.6667, 0.3333, 0.3333]
    assert figures["conditional"] == [0.6667, 0.5, 1.0]
    assert acceptance([Answer([1] * 8, rounds, [])], 3, within=5)["tau"] == 3
    one, other = Answer([1, 2, 3], [], [0.5, 0.1, 0.2]), Answer([1, 4, 3], [], [])
    assert divergences([one], [other]) == [{"prompt": 0, "token": 1, "margin": 0.1}]


def _prompts(folder: Path) -> Path:
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in (4, 6, 9)))
    return file


def _last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


def test_measure_prints_what_it_must(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--target {TARGET} --drafter {DRAFTER} --prompts {_prompts(tmp_path)} --limit 2"
    more = "--max-tokens 12 --temperature 1 --acceptance both --json"
    assert measurement.main([*arguments.split(), *more.split()]) == 0
    result = _last(capsys)
    assert result["event"] == "result" and result["prompts"] == 2
    assert 1 <= result["tau"] <= 8 and len(result["tau_by_position"]) == 7
    assert 1 <= result["rejection"]["tau"] <= 8
    assert result["divergences"] == []
    ratio = result["speculative_tokens_per_second"] / result["serial_tokens_per_second"]
    assert result["speedup"] == pytest.approx(ratio)
    for step in ("serial_step", "draft", "verify", "round"):
        assert result[f"{step}_seconds"] > 0
    assert result["cost_rows"] == 1
    # Half of an answer of 12 tokens or, where it stopped, fewer behind the prompt.
    prompt = len(ChatText(TARGET).prompt("count to 4"))
    assert prompt <= result["cost_depth"] <= prompt + 6


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("width", [None, 3])
def test_a_step_costs_what_the_clock_says(
    width: int | None, rejection: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only steps move, and slow first ones, which are not counted."""
    now, widths = 0.0, set()
    counts = {"step": 0, "draft": 0, "verify": 0}

    def moved(name: str, seconds: float) -> None:
        original = getattr(Decoder, name)

        def call(self: Decoder, *arguments: Any, **options: Any) -> Any:
            nonlocal now
            counts[name] += 1
            now += seconds if counts[name] > (2 if name == "step" else 4) else 1000.0
            made = original(self, *arguments, **options)
            if name == "draft":
                widths.add(made.tokens.shape)
            return made

        monkeypatch.setattr(Decoder, name, call)

    for name, seconds in (("step", 2.0), ("draft", 1.0), ("verify", 4.0)):
        moved(name, seconds)
    monkeypatch.setattr(round_costs.time, "perf_counter", lambda: now)
    decoder = Decoder(_target(), make_drafter("qwen3", dtype=mx.float32))
    prompts = [prompt["prompt_ids"] for prompt in _trace()[:3]]
    settings = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    try:
        costs = round_costs.round_costs(
            decoder, prompts, settings, repetitions=3, width=width, rejection=rejection
        )
    finally:
        decoder.close()
    assert costs == {
        "serial_step_seconds": 2.0,
        "draft_seconds": 1.0,
        "verify_seconds": 4.0,
        "round_seconds": 5.0,
        "break_even_tau": 2.5,
        "cost_rows": 3,
        "cost_depth": round(sum(map(len, prompts)) / 3),
    }
    assert counts == {"step": 5, "draft": 10, "verify": 10}
    assert widths == {(3, 7 if width is None else width)}


def test_costs_disturb_nothing_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--target {TARGET} --drafter {DRAFTER} --prompts {_prompts(tmp_path)}".split()
    more = ["--max-tokens", "12", "--rows", "2", "--no-serial", "--json"]
    results = []
    for repetitions in ("0", "1"):
        assert measurement.main([*arguments, *more, "--cost-repetitions", repetitions]) == 0
        results.append(_last(capsys))
    without, costs = results
    assert not [name for name in without if name.endswith("_seconds") or name.startswith("cost")]
    assert costs["cost_rows"] == 2
    assert (without["tau"], without["rounds"]) == (costs["tau"], costs["rounds"])
    with pytest.raises(SystemExit):
        measurement.main([*arguments, "--cost-repetitions", "-1"])
    assert "--cost-repetitions is -1" in capsys.readouterr().err


def test_help_names_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--target {TARGET} --drafter {DRAFTER} --prompts {_prompts(tmp_path)} --limit 1"
    more = "--max-tokens 8 --temperature 1 --acceptance both"
    assert measurement.main([*arguments.split(), *more.split()]) == 0
    result = _last(capsys)
    with pytest.raises(SystemExit):
        measurement.main(["--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(":", " ").replace(";", " ").split()
    assert [name for name in result if name not in (*words, "event", "command")] == []


def test_a_drafter_goes_out_in_the_form_it_came_in(tmp_path: Path) -> None:
    """In small form and back, with the target's matrices: what DeepSpec wrote, to the bit."""
    export.export(TARGET, DRAFTER, tmp_path / "small", None, False)
    export.export(TARGET, tmp_path / "small", tmp_path / "full", None, True)
    original = mx.load(str(DRAFTER / "model.safetensors"))
    small = mx.load(str(tmp_path / "small" / "model.safetensors"))
    full = mx.load(str(tmp_path / "full" / "model.safetensors"))
    assert isinstance(original, dict) and isinstance(full, dict) and isinstance(small, dict)
    assert full.keys() == original.keys()
    assert original.keys() - small.keys() == {"embed_tokens.weight", "lm_head.weight"}
    for name, value in original.items():
        assert mx.array_equal(full[name].astype(value.dtype), value), name
    written = json.loads((tmp_path / "full" / "config.json").read_text())
    assert written == json.loads((DRAFTER / "config.json").read_text())


def test_recipes() -> None:
    recipe = Recipe.parse("4:32,layers=8,layers.1=16,fc=16")
    assert recipe.bits_of("markov_head.markov_w2") == 4
    assert recipe.bits_of("layers.0.mlp.up_proj") == 8
    assert recipe.bits_of("layers.1.mlp.up_proj") == 16
    assert recipe.bits_of("fc") == 16
    for wrong in ("four", "4:32,head=8", "7:32", "4:32,fc"):
        with pytest.raises(DrafterError, match=wrong):
            Recipe.parse(wrong)


def test_a_quantized_drafter_loads_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe.parse("4:32,fc=8,markov_head=16")
    export.export(TARGET, DRAFTER, tmp_path, recipe, False)
    _, expanded = measurement.load_pair(TARGET, tmp_path, "float32")
    expected = make_drafter("qwen3", dtype=mx.float32)
    quantize_by_recipe(expected.network, recipe)
    dequantize_network(expected.network)
    one, other = expanded.network, expected.network
    assert mx.allclose(one.fc.weight, other.fc.weight, atol=2e-2)
    assert mx.array_equal(one.markov_head.markov_w2.weight, other.markov_head.markov_w2.weight)
    first, second = one.layers[0].mlp.up_proj, other.layers[0].mlp.up_proj
    assert mx.allclose(first.weight, second.weight, atol=2e-2)
    assert not mx.array_equal(
        first.weight, make_drafter("qwen3").network.layers[0].mlp.up_proj.weight
    )


def test_the_report_compares_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--target {TARGET} --drafter {DRAFTER} --prompts {_prompts(tmp_path)} --limit 2"
    more = f"--max-tokens 10 --recipes 8:32 --write 4:32 --out {tmp_path / 'out'}"
    assert quantize_report.main([*arguments.split(), *more.split()]) == 0
    result = _last(capsys)
    plain, eight = result["recipes"]
    assert plain["kept"] == 1 and eight["bytes"] < plain["bytes"] * 0.6
    assert result["written"] == (tmp_path / "out" / "model.safetensors").stat().st_size
