"""Every stage of the drafter, the heads and the acceptance rules against recorded numbers."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import acceptance
from models.dspark.heads import GatedHead, RecurrentHead, VanillaHead, prefix_above
from models.taps import Taps

from .pairs import FAMILIES, FIXTURES, goldens, make_drafter, target

TOLERANCE = 1e-4


def close(actual: mx.array, expected: mx.array, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert mx.abs(actual - expected).max().item() < tolerance


@pytest.mark.parametrize("family", FAMILIES)
class TestGoldens:
    def test_taps_are_layer_outputs(self, family: str) -> None:
        model: Any = target(family)
        recorded = goldens(family)
        last = len(model.layers) - 1
        taps = Taps(model, range(last))
        try:
            logits = model(recorded["prompt_ids"][None])
            outputs = mx.split(taps.take(), last, axis=-1)
        finally:
            taps.remove()
        close(logits[0, -1], recorded["target.last_logits"])
        for index, output in enumerate(outputs):
            close(output[0], recorded[f"target.hidden_states.{index + 1}"])

    def test_every_stage_of_two_rounds(self, family: str) -> None:
        drafter, recorded = make_drafter(family), goldens(family)
        network: Any = drafter.network
        context = drafter.new_context()
        context.open_row()
        for number in range(2):
            golden = {
                name.split(".", 1)[1]: value
                for name, value in recorded.items()
                if name.startswith(f"round{number}.")
            }
            features = golden["context_features"][None]
            close(network.fc(features)[0], golden["fc_out"])
            close(network.features(features)[0], golden["hidden_norm_out"])
            drafter.extend(context, features)
            context.advance([features.shape[1]])
            assert context.lengths == golden["start"].tolist()
            anchors = golden["draft_input_ids"][:1]
            layers = Taps(network, [0, 1])
            hidden = drafter.hidden(context, anchors)
            first, second = mx.split(layers.take()[0], 2, axis=-1)
            layers.remove()
            close(first, golden["layer0_out"])
            close(second, golden["layer1_out"])
            close(hidden[0], golden["final_hidden"])
            close(drafter.base_logits(hidden)[0], golden["base_logits"])
            draft = drafter.draft(context, anchors, keep_logits=True)
            assert draft.logits is not None and draft.confidence_logits is not None
            assert draft.tokens[0].tolist() == golden["tokens"].tolist()
            close(draft.logits[0], golden["logits"])
            close(draft.confidence_logits[0], golden["confidence_logits"])
            for layer in range(2):
                keys, values = context.committed(layer, 0)
                close(keys, golden[f"cache_k{layer}"])
                close(values, golden[f"cache_v{layer}"])

    def test_context_in_chunks_equals_context_at_once(self, family: str) -> None:
        drafter = make_drafter(family)
        features = goldens(family)["round0.context_features"][None]
        whole, pieces = drafter.new_context(), drafter.new_context()
        for context, chunks in ((whole, [features]), (pieces, mx.split(features, [3, 4, 20], 1))):
            context.open_row()
            for chunk in chunks:
                drafter.extend(context, chunk)
                context.advance([chunk.shape[1]])
        for layer in range(2):
            for one, other in zip(
                whole.committed(layer, 0), pieces.committed(layer, 0), strict=True
            ):
                close(one, other, 1e-6)

    @pytest.mark.parametrize("cap", [1, 3, 6])
    def test_a_cap_cuts_the_heads_only(self, family: str, cap: int) -> None:
        drafter, recorded = make_drafter(family), goldens(family)
        context = drafter.new_context()
        context.open_row()
        features = recorded["round0.context_features"][None]
        drafter.extend(context, features)
        context.advance([features.shape[1]])
        draft = drafter.draft(context, recorded["round0.draft_input_ids"][:1], cap=cap)
        assert draft.confidence_logits is not None and draft.logits is None
        assert draft.tokens[0].tolist() == recorded["round0.tokens"][:cap].tolist()
        close(draft.confidence_logits[0], recorded["round0.confidence_logits"][:cap])


class TestHeads:
    KINDS = (("vanilla", VanillaHead), ("gated", GatedHead), ("rnn", RecurrentHead))

    @staticmethod
    def load(kind: str, cls: type[VanillaHead], recorded: dict[str, mx.array]) -> VanillaHead:
        prefix = f"{kind}.param."
        head = cls(96, 32, 64)
        head.load_weights(
            [(n.removeprefix(prefix), v) for n, v in recorded.items() if n.startswith(prefix)]
        )
        return head

    @staticmethod
    def recorded() -> dict[str, mx.array]:
        loaded = mx.load(str(FIXTURES / "heads.safetensors"))
        assert isinstance(loaded, dict)
        return loaded

    @pytest.mark.parametrize(("kind", "cls"), KINDS)
    def test_greedy(self, kind: str, cls: type[VanillaHead]) -> None:
        recorded = self.recorded()
        head = self.load(kind, cls, recorded)
        previous, state = recorded["first_prev_token"], None
        tokens, rows = [], []
        for column in range(7):
            step = head.step(previous, recorded["hidden_states"][:, column], state)
            rows.append(recorded["base_logits"][:, column] + step.bias)
            previous, state = mx.argmax(rows[-1], axis=-1), step.state
            tokens.append(previous.item())
        assert tokens == recorded[f"{kind}.tokens"][0].tolist()
        close(mx.stack(rows, axis=1), recorded[f"{kind}.logits"])

    @pytest.mark.parametrize(("kind", "cls"), KINDS)
    def test_two_rows_with_given_tokens(self, kind: str, cls: type[VanillaHead]) -> None:
        recorded = self.recorded()
        head = self.load(kind, cls, recorded)
        state, rows = None, []
        for column in range(7):
            step = head.step(
                recorded["teacher_prev_tokens"][0, :, column],
                recorded["teacher_hidden"][0, :, column],
                state,
            )
            state = step.state
            rows.append(recorded["teacher_base_logits"][0, :, column] + step.bias)
        close(mx.stack(rows, axis=1), recorded[f"{kind}.teacher_logits"][0])


class TestThreshold:
    @pytest.mark.parametrize(
        ("confidences", "threshold", "count"),
        [
            ([0.9, 0.4, 0.9], 0.5, 1),
            ([0.9, 0.5, 0.9], 0.5, 3),  # equal is not under
            ([0.1, 0.9], 0.5, 0),
            ([0.1, 0.1], 0.0, 2),
            ([], 0.5, 0),
        ],
    )
    def test_cuts_before_the_first_under_it(
        self, confidences: list[float], threshold: float, count: int
    ) -> None:
        assert prefix_above(confidences, threshold) == count


VERIFY_CASES = json.loads((FIXTURES / "verify_cases.json").read_text())["cases"]


class TestAcceptance:
    @pytest.mark.parametrize("case", VERIFY_CASES)
    def test_rejection(self, case: dict[str, Any]) -> None:
        drafts = mx.array([case["draft_tokens"]], dtype=mx.int32)
        temperature = case["temperature"]
        outcome = acceptance.reject(
            drafts,
            acceptance.probabilities(mx.array([case["draft_logits"]]), temperature),
            acceptance.probabilities(mx.array([case["target_logits"]]), temperature),
            mx.array([case["uniforms"]]),
        )
        accepted = outcome.accepted.item()
        stops = set(case["stop_token_ids"] or [])
        stop = next((i for i in range(accepted) if case["draft_tokens"][i] in stops), None)
        assert case["terminated_by_stop_token"] == (stop is not None)
        assert case["accepted"] == (accepted if stop is None else stop + 1)
        if stop is None:
            expected = mx.array(case["bonus_or_residual_distribution"])
            close(outcome.distribution[0], expected)

    def test_rejection_of_all_cases_in_one_batch(self) -> None:
        cases = [c for c in VERIFY_CASES if len(c["draft_tokens"]) == 4]
        drafts = mx.array([c["draft_tokens"] for c in cases], dtype=mx.int32)

        def stacked(field: str) -> mx.array:
            return mx.concatenate(
                [acceptance.probabilities(mx.array([c[field]]), c["temperature"]) for c in cases]
            )

        uniforms = mx.array([c["uniforms"] for c in cases])
        together = acceptance.reject(
            drafts, stacked("draft_logits"), stacked("target_logits"), uniforms
        )
        for row in range(len(cases)):
            alone = acceptance.reject(
                drafts[row : row + 1],
                stacked("draft_logits")[row : row + 1],
                stacked("target_logits")[row : row + 1],
                uniforms[row : row + 1],
            )
            assert together.accepted[row].item() == alone.accepted[0].item()
            close(together.distribution[row], alone.distribution[0], 1e-7)

    @pytest.mark.parametrize("case", [c for c in VERIFY_CASES if c["temperature"] == 0])
    def test_at_temperature_0_coupling_and_rejection_agree(self, case: dict[str, Any]) -> None:
        drafts = mx.array([case["draft_tokens"]], dtype=mx.int32)
        targets = mx.argmax(mx.array([case["target_logits"]]), axis=-1)
        matched = acceptance.count_matches(drafts, targets).item()
        if not case["terminated_by_stop_token"]:
            assert matched == case["accepted"]
        assert (
            case["bonus_or_residual_distribution"][targets[0, matched].item()] == 1
            or (case["terminated_by_stop_token"])
        )

    def test_lengths_bound_each_row(self) -> None:
        drafts = mx.array([[5, 6, 7]] * 4, dtype=mx.int32)
        targets = mx.array([[5, 6, 7, 8]] * 3 + [[5, 0, 7, 8]], dtype=mx.int32)
        lengths = mx.array([0, 2, 3, 3])
        assert acceptance.count_matches(drafts, targets, lengths).tolist() == [0, 2, 3, 1]
        outcome = acceptance.reject(
            drafts, mx.eye(9)[drafts], mx.eye(9)[targets], mx.full((4, 3), 0.5), lengths
        )
        assert outcome.accepted.tolist() == [0, 2, 3, 1]
        # A row whose drafts all passed goes on with the target's own row, not a residual.
        assert mx.argmax(outcome.distribution, axis=-1).tolist() == [5, 7, 8, 0]

    def test_no_drafts(self) -> None:
        none = mx.zeros((2, 0), dtype=mx.int32)
        assert acceptance.count_matches(none, mx.array([[3], [4]])).tolist() == [0, 0]

    def test_rejection_keeps_the_targets_distribution(self) -> None:
        rng = np.random.default_rng(5)
        vocabulary, trials = 12, 20_000
        target_logits = mx.array(rng.normal(size=(1, 2, vocabulary)).astype(np.float32) * 1.5)
        draft_logits = target_logits[:, :1] + mx.array(
            rng.normal(size=(1, 1, vocabulary)).astype(np.float32)
        )
        seeds = mx.arange(trials)
        positions = mx.zeros((trials, 1), dtype=mx.int32) + 17
        offered = mx.broadcast_to(
            acceptance.probabilities(draft_logits, 1.0), (trials, 1, vocabulary)
        )
        wanted = mx.broadcast_to(
            acceptance.probabilities(target_logits, 1.0), (trials, 2, vocabulary)
        )
        # Drafts from plain noise of their own.
        drafts = mx.random.categorical(
            mx.broadcast_to(draft_logits[:, 0], (trials, vocabulary)), key=mx.random.key(3)
        )[:, None].astype(mx.int32)
        outcome = acceptance.reject(
            drafts,
            offered,
            wanted,
            acceptance.keyed_uniforms(seeds, positions, acceptance.Stream.ACCEPT),
        )
        redrawn = acceptance.draw(
            outcome.distribution,
            acceptance.keyed_gumbel(seeds, positions[:, 0], vocabulary, acceptance.Stream.REDRAW),
        )
        tokens = mx.where(outcome.accepted > 0, drafts[:, 0], redrawn)
        counts = np.bincount(np.array(tokens), minlength=vocabulary)
        expected = np.array(wanted[0, 0]) * trials
        chi_square = float((((counts - expected) ** 2) / expected).sum())
        assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand

    def test_noise_is_a_function_of_seed_position_and_stream(self) -> None:
        seeds = mx.array([7, 7, 8], dtype=mx.uint32)
        positions = mx.array([[3, 4], [4, 5], [3, 4]])
        drawn = acceptance.keyed_uniforms(seeds, positions, acceptance.Stream.ACCEPT).tolist()
        assert drawn[0][1] == drawn[1][0]
        assert drawn[0] != drawn[2]
        other = acceptance.keyed_uniforms(seeds, positions, acceptance.Stream.REDRAW).tolist()
        assert all(a != b for a, b in zip(drawn, other, strict=True))
