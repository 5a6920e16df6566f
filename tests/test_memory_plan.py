"""The memory plan: its sums, its bounds, and what it says when it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.configuration import MemorySection, ModelSection, Precision
from daemon.draft_section import DraftSection, SpeculationMode
from daemon.drafter_budget import with_drafter
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.memory_budget import PlannedModel, model_needs, plan_models, plan_with_drafters
from models.checkpoint import inspect
from models.dspark.configuration import TargetShape
from models.dspark.loader import load_drafter, save_drafter
from models.dspark.shortlist import Shortlist
from models.target import Target
from scheduler.ledger import KvCost
from scheduler.memory_plan import (
    PROCESS_BYTES,
    ActivationShape,
    DoesNotFit,
    MemoryLimit,
    MemoryNeeds,
    plan_memory,
    plan_together,
    prefill_transients,
)
from tests.tiny_models import save_tiny_checkpoint

GIGABYTE = 10**9
SMALL = MemoryNeeds(
    model="small",
    weight_bytes=540_000_000,
    kv_cost=KvCost(bytes_per_token=46_080),
    activations=ActivationShape(hidden=576, intermediate=1536, attention_heads=9, scores=True),
    element_bytes=4,
    chunk_tokens=512,
    maximum_rows=8,
    context_length=8192,
    minimum_tokens=2048,
)


def test_the_parts_add_up_to_the_limit_when_memory_is_short() -> None:
    limit = MemoryLimit(2 * GIGABYTE, "the machine")
    plan = plan_memory(SMALL, limit, reserve=100_000_000)
    assert plan.total + 100_000_000 == limit.bytes
    assert plan.weights == SMALL.weight_bytes


def test_no_more_is_planned_than_all_rows_can_use() -> None:
    plan = plan_memory(SMALL, MemoryLimit(1000 * GIGABYTE, "the machine"), reserve=0)
    assert plan.kv_budget == 8 * 8192 * 46_080


def test_transients_by_hand() -> None:
    values = 512 * (4 * 576 + 3 * 1536 + 9 * 8192)
    assert prefill_transients(SMALL) == values * 4
    fused = msgspec.structs.replace(SMALL.activations, scores=False)
    without = msgspec.structs.replace(SMALL, activations=fused)
    assert prefill_transients(without) == 512 * (4 * 576 + 3 * 1536) * 4


def test_a_refusal_names_limit_value_need_and_remedy() -> None:
    with pytest.raises(DoesNotFit) as refusal:
        plan_memory(SMALL, MemoryLimit(GIGABYTE, "the control group /docker"), reserve=0)
    message = str(refusal.value)
    need = SMALL.weight_bytes + prefill_transients(SMALL) + PROCESS_BYTES + 2048 * 46_080
    assert "the control group /docker leaves 1.00 GB" in message
    assert f"small needs {need / 1e9:.2f} GB" in message
    assert "smaller model" in message


@given(
    limit=st.integers(0, 20 * GIGABYTE),
    reserve=st.integers(0, 2 * GIGABYTE),
    rows=st.integers(1, 64),
    per_row=st.integers(0, 10**8),
)
def test_a_plan_never_exceeds_its_limit_and_holds_one_row(
    limit: int, reserve: int, rows: int, per_row: int
) -> None:
    cost = KvCost(bytes_per_token=46_080, bytes_per_row=per_row)
    needs = msgspec.structs.replace(SMALL, kv_cost=cost, maximum_rows=rows)
    try:
        plan = plan_memory(needs, MemoryLimit(limit, "the test"), reserve)
    except DoesNotFit:
        return
    assert plan.total + reserve <= limit
    assert cost.longest(1, plan.kv_budget) >= needs.minimum_tokens


def test_models_served_together_share_what_is_left() -> None:
    modest = msgspec.structs.replace(SMALL, model="modest", maximum_rows=1)
    alone = plan_memory(modest, MemoryLimit(1000 * GIGABYTE, "the machine"), reserve=0)
    limit = MemoryLimit(6 * GIGABYTE, "the machine")
    first, second, third = plan_together([SMALL, modest, SMALL], limit, reserve=10**8)
    assert second.kv_budget == alone.kv_budget
    assert abs(first.kv_budget - third.kv_budget) <= 1
    assert first.total + second.total + third.total + 10**8 == pytest.approx(limit.bytes, abs=2)
    with pytest.raises(DoesNotFit, match="modest needs"):
        plan_together([SMALL, modest, SMALL], MemoryLimit(3 * GIGABYTE, "the machine"), 10**8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


@given(tokens=st.integers(0, 1 << 20), rows=st.integers(0, 300))
def test_the_ledger_prices_what_the_engine_allots(tiny: Target, tokens: int, rows: int) -> None:
    cost = KvCost(bytes_per_token=tiny.kv_bytes_per_token)
    if rows:
        assert cost.rectangle(rows, tokens) == tiny.cache_bytes(rows, tokens)
    else:
        assert cost.rectangle(rows, tokens) == 0


def test_rows_and_tokens_are_rounded_up_as_they_are_allotted() -> None:
    cost = KvCost(bytes_per_token=10, bytes_per_row=7)
    assert cost.rectangle(5, 300) == 6 * (512 * 10 + 7)
    assert cost.rectangle(0, 300) == 0


@given(
    rows=st.integers(1, 20),
    budget=st.integers(0, 10**9),
    per_token=st.integers(1, 10**6),
    per_row=st.integers(0, 10**8),
)
def test_longest_is_the_inverse_of_the_rectangle(
    rows: int, budget: int, per_token: int, per_row: int
) -> None:
    cost = KvCost(bytes_per_token=per_token, bytes_per_row=per_row)
    longest = cost.longest(rows, budget)
    if longest:
        assert cost.rectangle(rows, longest) <= budget
    assert cost.rectangle(rows, longest + 1) > budget


def test_the_default_model_has_the_needs_that_its_engine_has(smollm2: Path) -> None:
    """On the CPU: float32 weights and caches, whatever the checkpoint stores."""
    facts = inspect(smollm2)
    section = ModelSection(name="default")
    needs = model_needs(section, facts, on_gpu=False)
    assert needs.weight_bytes == facts.float32_bytes
    assert needs.kv_cost == KvCost(bytes_per_token=2 * 30 * 3 * 64 * 4)
    assert needs.activations.hidden == 576
    assert needs.context_length == 8192
    stored = model_needs(section, facts, on_gpu=True)
    assert stored.weight_bytes == facts.weight_bytes
    assert stored.kv_cost == KvCost(bytes_per_token=2 * 30 * 3 * 64 * 2)
    half = ModelSection(name="default", precision=Precision.BFLOAT16, maximum_context=4000)
    needs = model_needs(half, facts, on_gpu=True)
    assert needs.weight_bytes == 2 * facts.parameters
    assert (needs.context_length, needs.minimum_tokens) == (4000, 4000)


def test_a_configured_limit_counts_and_is_named(smollm2: Path) -> None:
    models = [PlannedModel(ModelSection(name="default"), inspect(smollm2))]
    ((plan, _),) = plan_models(models, MemorySection(limit_bytes=3 * GIGABYTE, reserve_bytes=0))
    assert plan.total == 3 * GIGABYTE
    with pytest.raises(SparklaneError, match=r"memory\.limit_bytes leaves 0\.50 GB") as error:
        plan_models(models, MemorySection(limit_bytes=GIGABYTE // 2))
    assert error.value.exit_code == ExitCode.CONFIGURATION


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_drafter_is_planned_for_as_it_will_be_held(family: str, bits: int) -> None:
    folder = Path(__file__).parent / "fixtures" / "dspark" / family
    facts = inspect(folder / "target")
    needs = model_needs(ModelSection(name="pair"), facts, on_gpu=False)
    planned = with_drafter(
        needs,
        folder / "drafter",
        bits=bits,
        group_size=64,
        own_head=False,
        shortlist=True,
        target_width=4,
    )
    target = Target.load(folder / "target")
    drafter = load_drafter(
        folder / "drafter", target.model, TargetShape.read(folder / "target"), bits=bits
    )
    context = planned.kv_cost.bytes_per_token - needs.kv_cost.bytes_per_token
    assert context == drafter.context_bytes_per_token
    # Norms and biases stay whole, and scales are float32 here instead of 16 bits.
    weights = planned.weight_bytes - needs.weight_bytes
    assert weights == pytest.approx(drafter.weight_bytes, rel=0.001 if bits == 16 else 0.25)


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("stored_bits", [None, 4])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_a_shortlist_is_planned_for_as_it_will_be_held(
    family: str, stored_bits: int | None, own_head: bool, tmp_path: Path
) -> None:
    folder, drafter_folder = Path(__file__).parent / "fixtures" / "dspark" / family, tmp_path
    target = Target.load(folder / "target", "float32")
    shape = TargetShape.read(folder / "target")
    source = load_drafter(
        folder / "drafter", target.model, shape, bits=stored_bits, own_head=own_head
    )
    save_drafter(source, drafter_folder)
    Shortlist(tokens=tuple(range(0, 200, 2)), coverage=0.5, counted=9, corpus="").save(
        drafter_folder
    )
    needs = model_needs(ModelSection(name="pair"), target.facts, on_gpu=False)
    planned, held = {}, {}
    for used in (False, True):
        planned[used] = (
            with_drafter(
                needs,
                drafter_folder,
                bits=stored_bits or 16,
                group_size=64,
                own_head=own_head,
                shortlist=used,
                target_width=4,
            ).weight_bytes
            - needs.weight_bytes
        )
        held[used] = load_drafter(
            drafter_folder, target.model, shape, own_head=own_head, shortlist=used
        ).weight_bytes
        # As above: norms stay whole, and scales are float32 here.
        rel = 0.25 if stored_bits else 0.001
        assert planned[used] == pytest.approx(held[used], rel=rel)
    assert planned[True] != planned[False]
    if stored_bits is None:
        assert planned[True] - planned[False] == held[True] - held[False]


def test_a_torn_shortlist_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    source = Path(__file__).parent / "fixtures" / "dspark" / "qwen3"
    folder = tmp_path / "drafter"
    shutil.copytree(source / "drafter", folder, copy_function=shutil.copyfile)
    (folder / "shortlist.safetensors").write_bytes(b"torn")
    draft = DraftSection(checkpoint=str(folder))
    facts = inspect(source / "target")
    memory = MemorySection(limit_bytes=3 * GIGABYTE, reserve_bytes=0)
    with pytest.raises(SparklaneError, match=r"shortlist\.safetensors: truncated") as error:
        plan_models([PlannedModel(ModelSection(name="a", draft=draft), facts, folder)], memory)
    assert error.value.exit_code == ExitCode.CHECKPOINT
    without = msgspec.structs.replace(draft, shortlist=False)
    plan_models([PlannedModel(ModelSection(name="a", draft=without), facts, folder)], memory)


@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.ALWAYS])
@pytest.mark.parametrize("name", ["smollm2-135m", "another"])
def test_a_drafter_that_came_with_a_model_never_keeps_it_from_serving(
    name: str, mode: SpeculationMode, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(__file__).parent / "fixtures" / "dspark" / "qwen3"
    draft = DraftSection(checkpoint="smollm2-135m-drafter", speculation=mode)
    section = ModelSection(name=name, draft=draft)
    drafted = PlannedModel(section, inspect(source / "target"), source / "drafter")
    bare = drafted._replace(drafter=None)
    most = 3 * GIGABYTE

    def fits(model: PlannedModel, limit: int) -> bool:
        try:
            plan_models([model], MemorySection(limit_bytes=limit, reserve_bytes=0))
        except SparklaneError:
            return False
        return True

    low, high = 0, most
    while high - low > 1:  # the least memory for the model alone
        middle = (low + high) // 2
        low, high = (low, middle) if fits(bare, middle) else (middle, high)
    assert not fits(drafted, high)
    tight = MemorySection(limit_bytes=high, reserve_bytes=0)
    roomy = MemorySection(limit_bytes=most, reserve_bytes=0)
    assert plan_with_drafters([drafted], roomy)[0] == [drafted]
    if name == "smollm2-135m" and mode is SpeculationMode.AUTO:
        assert plan_with_drafters([drafted], tight)[0] == [bare]
        assert "without the drafter that came with the model" in caplog.text
    else:
        with pytest.raises(SparklaneError):
            plan_with_drafters([drafted], tight)
