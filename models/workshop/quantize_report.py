"""What bits cost: acceptance and bytes of a drafter under several recipes.

Run as `python -m models.workshop.quantize_report --target DIR --drafter DIR --prompts FILE...`,
in a process of its own. Every recipe answers the same prompts; `kept` is its share of the
unquantized drafter's tokens a round. `--write RECIPE --out DIR` stores one of them.
Exits with 2 when something cannot be loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, TargetShape
from models.dspark.loader import load_drafter
from models.target import Target
from models.workshop.chat_text import ChatText
from models.workshop.dequantized import dequantize_network
from models.workshop.export import export
from models.workshop.measurement import measure
from models.workshop.progress import refuse, say
from models.workshop.quantization import Recipe, quantize_by_recipe, stored_weights
from models.workshop.regeneration import read_prompts
from models.workshop.run_folder import RunError, write_json
from models.workshop.speculation import Decoder

RECIPES = ("8:64", "8:32", "4:64", "4:32", "4:32,fc=8", "4:32,markov_head=8", "4:32,layers=8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        text = ChatText(options.target)
        prompts = [
            text.prompt(prompt)
            for file in options.prompts
            for prompt in read_prompts([file])[: options.limit]
        ]
        target = Target.load(options.target)
        shape = TargetShape.read(options.target)
        say("start", command="quantize", prompts=len(prompts))
        rows: list[dict[str, Any]] = []
        for recipe in ("16:32", *options.recipes):
            drafter = load_drafter(options.drafter, target.model, shape, shortlist=False)
            quantize_by_recipe(drafter.network, Recipe.parse(recipe))
            size = sum(value.nbytes for value in stored_weights(drafter.network).values())
            # What is measured is the rounding of weights, not a slower kernel.
            dequantize_network(drafter.network)
            decoder = Decoder(target, drafter)
            found = measure(
                decoder,
                prompts,
                block=drafter.block_size,
                count=options.max_tokens,
                temperature=options.temperature,
                seed=0,
                rows=options.rows,
                serial=False,
            )
            decoder.close()
            rows.append({"recipe": recipe, "bytes": size, "tau": found["tau"]})
            rows[-1]["kept"] = found["tau"] / rows[0]["tau"]
            say("recipe", **rows[-1])
        if options.report:
            write_json(options.report, rows)
        size = 0
        if options.write:
            size = export(
                options.target, options.drafter, options.out, Recipe.parse(options.write), False
            )
    except (CheckpointError, DrafterError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot quantize: {error}")
    say("result", command="quantize", recipes=rows, written=size)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.quantize_report", description="What bits cost."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--drafter", type=Path, required=True, help="folder of an unquantized drafter")
    add("--prompts", type=Path, nargs="+", required=True, help="JSON lines with `prompt`")
    add("--limit", type=int, default=16, help="prompts of each file")
    add("--max-tokens", type=int, default=64, help="tokens of an answer")
    add("--temperature", type=float, default=0.0)
    add("--rows", type=int, default=16, help="prompts decoded together")
    add("--recipes", nargs="+", default=list(RECIPES), help="BITS:GROUP[,PART=BITS]")
    add("--report", type=Path, help="file for the table")
    add("--write", help="recipe of the drafter to store")
    add("--out", type=Path, help="folder to store it in")
    options = parser.parse_args(arguments)
    if options.write and not options.out:
        parser.error("--write needs --out")
    return options


if __name__ == "__main__":
    sys.exit(main())
