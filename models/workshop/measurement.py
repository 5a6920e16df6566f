"""Measure a drafter: tokens a round, and wall clock against decoding without it.

Run as `python -m models.workshop.measurement --target DIR --drafter DIR --prompts FILE`, in a
process of its own. The two ways of decoding take turns, prompt by prompt, in changing order, so
that a change of the machine's load hits both. With `--acceptance both`, coupled acceptance and
rejection sampling are measured side by side. With `--json` the result is one JSON object.
Exits with 2 when something cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from models import cuda_settings
from models.backend import DeviceKind, device_kind
from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, TargetShape
from models.dspark.drafter import Drafter
from models.dspark.loader import load_drafter
from models.sampling_settings import Sampling
from models.target import Target
from models.workshop.chat_text import ChatText
from models.workshop.dequantized import dequantize_network
from models.workshop.figures import acceptance, divergences, looping_share
from models.workshop.progress import refuse, say
from models.workshop.regeneration import read_prompts
from models.workshop.round_costs import describe, round_costs
from models.workshop.run_folder import RunError, versions
from models.workshop.speculation import Answer, Decoder, Timed

FIELDS = """\
fields of the result:
  tau                     tokens of a round, bonus included; tau_first_64 of rounds that begin in
                          an answer's first 64 tokens
  tau_by_position         share of drafts at each position accepted with all before them;
                          conditional: of those whose predecessors were
  rounds, tokens          rounds that count for tau, and tokens of the answers
  looping_share           answers that repeat themselves, which flatters tau at temperature 0
  serial_tokens_per_second, speculative_tokens_per_second, speedup
                          wall clock from the end of the prompts, and the ratio
  divergences             where texts part, with the target's top-2 margin there
  serial_step_seconds     a step without the drafter: one token for every row
  draft_seconds           a block's drafts, and taking in what the last round committed
  verify_seconds          the target on the block
  round_seconds           both with a single wait, as rounds are decoded
  break_even_tau          tokens a round from which rounds are faster than serial steps
  cost_rows, cost_depth   the rows, and the mean tokens of each, that these five hold for
  rejection               acceptance and speed under rejection sampling, with --acceptance both
  prompts, temperature, rows, dataset, max_tokens, drafter_bytes, shortlist, precision,
  peak_memory, versions   what was measured, and with what; bytes, and tokens of the shortlist
"""


def load_pair(
    target_folder: Path,
    drafter_folder: Path,
    precision: str = "auto",
    bits: int | None = None,
    *,
    shortlist: bool = True,
) -> tuple[Target, Drafter]:
    """A pair as it is served, with the drafter's stored shortlist unless `shortlist` is false.
    On the CPU a quantized drafter is expanded: only float32 products are fast there."""
    cuda_settings.prepare(growing_keys=True)
    target = Target.load(target_folder, precision)
    shape = TargetShape.read(target_folder)
    drafter = load_drafter(drafter_folder, target.model, shape, bits=bits, shortlist=shortlist)
    if device_kind() is DeviceKind.CPU:
        dequantize_network(drafter.network)
    return target, drafter


def measure(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    *,
    block: int,
    count: int,
    temperature: float,
    seed: int,
    rows: int = 1,
    width: int | None = None,
    acceptances: Sequence[str] = ("coupled",),
    serial: bool = True,
    seconds: float = 0.0,
    cost_repetitions: int = 0,
) -> dict[str, Any]:
    """Decode `prompts` in groups of `rows`, both ways; see `FIELDS`. Stops early after
    `seconds`. With `cost_repetitions`, what steps and rounds cost is measured afterwards, where
    the first group was halfway through its answers."""
    plain: list[Answer] = []
    answers: dict[str, list[Answer]] = {kind: [] for kind in acceptances}
    spent = dict.fromkeys(("serial", *acceptances), 0.0)
    started = time.monotonic()
    done = 0
    for number, at in enumerate(range(0, len(prompts), rows)):
        if 0 < seconds < time.monotonic() - started and number:
            break
        group = list(prompts[at : at + rows])
        settings = [
            Sampling(temperature=temperature, seed=seed + at + index) for index in range(len(group))
        ]
        ways = [*(["serial"] if serial else []), *acceptances]
        for way in ways if number % 2 == 0 else reversed(ways):
            timed: Timed
            if way == "serial":
                timed = decoder.serial(group, settings, count)
                plain += timed.answers
            else:
                timed = decoder.speculative(
                    group, settings, count, width=width, rejection=way == "rejection"
                )
                answers[way] += timed.answers
            spent[way] += timed.seconds
        done += len(group)
        say("progress", done=done, total=len(prompts))
    result: dict[str, Any] = {"prompts": done, "temperature": temperature, "rows": rows}
    for kind in acceptances:
        own = answers[kind]
        tokens = sum(len(answer.tokens) for answer in own)
        figures: dict[str, Any] = {
            **acceptance(own, block),
            "tau_first_64": acceptance(own, block, 64)["tau"],
            "looping_share": round(looping_share(own), 4),
            "tokens": tokens,
            "speculative_tokens_per_second": tokens / max(spent[kind], 1e-9),
        }
        if serial:
            rate = sum(len(answer.tokens) for answer in plain) / max(spent["serial"], 1e-9)
            figures["serial_tokens_per_second"] = rate
            figures["speedup"] = figures["speculative_tokens_per_second"] / max(rate, 1e-9)
            if kind == "coupled":
                figures["divergences"] = divergences(plain, own)
        if kind == acceptances[0]:
            result.update(figures)
        else:
            result[kind] = figures
    result["peak_memory"] = mx.get_peak_memory()
    if cost_repetitions:
        # Both ways' caches are there at once, which is not what decoding takes.
        first = answers[acceptances[0]][:rows]
        result.update(
            round_costs(
                decoder,
                [
                    prompt + answer.tokens[: len(answer.tokens) // 2]
                    for prompt, answer in zip(prompts, first, strict=False)
                ],
                [Sampling(temperature=temperature, seed=seed + at) for at in range(len(first))],
                repetitions=cost_repetitions,
                width=width,
                rejection=acceptances[0] == "rejection",
            )
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        target, drafter = load_pair(
            options.target,
            options.drafter,
            options.precision,
            options.draft_bits,
            shortlist=not options.no_shortlist,
        )
        text = ChatText(options.target)
        prompts = [text.prompt(prompt) for prompt in read_prompts([options.prompts])]
        decoder = Decoder(target, drafter)
        say("start", command="measure", prompts=min(options.limit, len(prompts)))
        chosen = prompts[: options.limit]
        common: dict[str, Any] = {
            "block": drafter.block_size,
            "temperature": options.temperature,
            "seed": options.seed,
            "rows": options.rows,
            "width": options.width,
        }
        # Kernels are built and caches grown before anything is timed.
        measure(decoder, chosen[: options.rows], count=16, **common)
        both = ("coupled", "rejection")
        result = measure(
            decoder,
            chosen,
            count=options.max_tokens,
            acceptances=both if options.acceptance == "both" else (options.acceptance,),
            serial=not options.no_serial,
            seconds=options.seconds,
            cost_repetitions=options.cost_repetitions,
            **common,
        )
        decoder.close()
    except (CheckpointError, DrafterError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot measure: {error}")
    result.update(
        dataset=options.prompts.stem,
        max_tokens=options.max_tokens,
        drafter_bytes=drafter.weight_bytes,
        shortlist=None if drafter.short_head is None else len(drafter.short_head),
        precision=target.precision,
        versions=versions(),
    )
    if options.cost_repetitions:
        say("note", message=describe(result))
    say("result", command="measure", **result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.measurement",
        description="Measure a drafter.",
        epilog=FIELDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--prompts", type=Path, required=True, help="JSON lines with `prompt`")
    add("--limit", type=int, default=1 << 30, help="prompts")
    add("--max-tokens", type=int, default=256, help="tokens of an answer")
    add("--temperature", type=float, default=0.0)
    add("--acceptance", choices=("coupled", "rejection", "both"), default="coupled")
    add("--rows", type=int, default=1, help="prompts decoded together")
    add("--width", type=int, help="drafts verified a round; the whole block by default")
    add("--draft-bits", type=int, choices=(4, 8, 16), help="quantize the drafter")
    add("--no-shortlist", action="store_true", help="draft from the whole vocabulary")
    add("--precision", default="auto", help="of the target")
    add("--no-serial", action="store_true", help="do not decode without the drafter")
    add("--seconds", type=float, default=0.0, help="begin no prompt after so long")
    add("--cost-repetitions", type=int, default=7, help="of each step whose cost is told; 0: none")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="file for the result")
    add("--json", action="store_true", help="the result is JSON, as all output is")
    options = parser.parse_args(arguments)
    if options.cost_repetitions < 0:
        parser.error(f"--cost-repetitions is {options.cost_repetitions}; it must be at least 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
