"""The command group: steps run as children, and what they say is shown."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.testing import CliRunner

from daemon import drafter_commands
from tests.dspark.pairs import FIXTURES

PAIR = FIXTURES / "qwen3"


def test_a_step_runs_as_a_child_and_prints_its_result(tmp_path: Path) -> None:
    out = tmp_path / "small"
    arguments = f"--target {PAIR / 'target'} --drafter {PAIR / 'drafter'} --out {out}"
    group = click.Group("sparklane")
    drafter_commands.register(group)
    ran = CliRunner().invoke(group, ["drafter", "export", *arguments.split()])
    assert ran.exit_code == 0, ran.output
    assert (out / "model.safetensors").exists()
    assert str(out) in ran.stdout.replace("\n", "")


def test_a_refusal_is_the_steps_own(tmp_path: Path) -> None:
    arguments = f"--target {PAIR / 'target'} --drafter {tmp_path} --out {tmp_path / 'out'}"
    ran = CliRunner().invoke(drafter_commands.drafter, ["export", *arguments.split()])
    assert ran.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_trace_is_compared_and_a_difference_is_an_exit_code(tmp_path: Path) -> None:
    trace = json.loads((PAIR / "trace_float32_thr0.json").read_text())
    trace["prompts"] = trace["prompts"][:1]
    pair = ["--target", str(PAIR / "target"), "--drafter", str(PAIR / "drafter")]
    for change, code in ((0, 0), (1, 1)):
        trace["prompts"][0]["rounds"][1]["draft_tokens"][2] += change
        file = tmp_path / f"trace{change}.json"
        file.write_text(json.dumps(trace))
        arguments = ["compare", "--trace", str(file), *pair]
        ran = CliRunner().invoke(drafter_commands.drafter, arguments)
        assert ran.exit_code == code, ran.output


def test_every_step_is_a_module() -> None:
    folder = Path(drafter_commands.__file__).parent.parent / "models"
    for module, _ in drafter_commands.STEPS.values():
        assert (folder / f"{module.replace('.', '/')}.py").exists()
    assert sorted(drafter_commands.STEPS) == [
        "calibrate", "card", "compare", "export", "measure", "quantize", "regen", "shortlist",
        "taps", "train",
    ]  # fmt: skip
