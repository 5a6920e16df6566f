"""A real engine that does not know its costs: it serves, measures while idle, then drafts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scheduler.ledger import CacheRoom, KvCost
from scheduler.messages import Configure, Heartbeat, LaneChoice, Shutdown
from scheduler.round_costs import CostRecord
from tests.engine_client import EngineClient, running_engine, submit
from tests.test_speculative_engine import PROMPTS, configure


def configured(folder: Path, *, rows: int = 2, room: CacheRoom | None = None) -> Configure:
    found = configure("qwen3", always=False, costs_folder=str(folder / "costs"))
    return msgspec.structs.replace(found, maximum_rows=rows, room=room)


def stored(folder: Path) -> CostRecord:
    (file,) = (folder / "costs").glob("*.json")
    return msgspec.json.decode(file.read_bytes(), type=CostRecord)


def heartbeats_until_measured(client: EngineClient) -> list[tuple[int, int]]:
    """What an idle engine says of its measuring, up to the heartbeat without any."""
    told = []
    while isinstance(message := client.receive(), Heartbeat):
        if message.measuring is None:
            return told
        told.append((message.measuring.timed, message.measuring.total))
    raise AssertionError(message)


def test_an_idle_engine_measures_stores_and_knows(tmp_path: Path) -> None:
    with running_engine(tmp_path, configured(tmp_path)) as client:
        client.until_ready()
        # 7 drafts: 8 widths and a draft, seven times, for 1 row and for 2.
        told = heartbeats_until_measured(client)
        assert all(total == 9 * 7 * 2 for _, total in told)
        assert [timed for timed, _ in told] == sorted(timed for timed, _ in told)
        record = stored(tmp_path)
        assert {(c.rows, c.width) for c in record.verify} == {
            (rows, width) for rows in (1, 2) for width in range(1, 9)
        }
        assert record.draft.keys() == {1, 2}
    with running_engine(tmp_path, configured(tmp_path)) as client:
        client.until_ready()
        beat = client.receive()
        assert isinstance(beat, Heartbeat) and beat.measuring is None
    assert stored(tmp_path) == record


def test_a_part_is_gone_on_with(tmp_path: Path) -> None:
    with running_engine(tmp_path, configured(tmp_path)) as client:
        client.until_ready()
        heartbeats_until_measured(client)
    whole = stored(tmp_path)
    part = CostRecord(
        key=whole.key,
        verify=[cost for cost in whole.verify if cost.rows == 1],
        draft={1: whole.draft[1]},
    )
    part.save(tmp_path / "costs")
    with running_engine(tmp_path, configured(tmp_path)) as client:
        client.until_ready()
        told = heartbeats_until_measured(client)
        assert all(timed >= 63 for timed, _ in told)
    resumed = stored(tmp_path)
    assert [cost for cost in resumed.verify if cost.rows == 1] == part.verify
    assert resumed.draft.keys() == {1, 2} and resumed.draft[1] == part.draft[1]


def test_requests_before_and_between_slices_are_served_plainly(tmp_path: Path) -> None:
    with running_engine(tmp_path, configured(tmp_path, rows=8)) as client:
        client.until_ready()
        first = client.run(submit(1, PROMPTS[0], max_tokens=20))[1]
        texts = [client.run(submit(2, PROMPTS[0], max_tokens=20))[2] for _ in range(5)]
        serial = client.run(submit(3, PROMPTS[0], max_tokens=20, lane=LaneChoice.SERIAL))[3]
        assert first == serial and all(text == serial for text in texts)


def test_an_engine_that_is_told_to_stop_does_not_finish_measuring(tmp_path: Path) -> None:
    with running_engine(tmp_path, configured(tmp_path, rows=64)) as client:
        client.until_ready()
        client.send(Shutdown())
        assert client.process.wait(60) == 0
    assert not list((tmp_path / "costs").glob("*.json")) or 64 not in stored(tmp_path).draft


def test_rows_without_room_are_not_measured(tmp_path: Path) -> None:
    cost = KvCost(bytes_per_token=100)
    room = CacheRoom(budget=cost.rectangle(1, 512), cost=cost)
    with running_engine(tmp_path, configured(tmp_path, rows=4, room=room)) as client:
        client.until_ready()
        told = heartbeats_until_measured(client)
        assert all(total == 63 for _, total in told)
    assert stored(tmp_path).draft.keys() == {1}


@pytest.mark.parametrize("short", [LaneChoice.SERIAL, LaneChoice.AUTO])
def test_the_last_token_of_one_lane_does_not_wait_for_the_other(
    tmp_path: Path, short: LaneChoice
) -> None:
    long = LaneChoice.AUTO if short is LaneChoice.SERIAL else LaneChoice.SERIAL
    with running_engine(tmp_path, configured(tmp_path, rows=8)) as client:
        client.until_ready()
        client.send(submit(1, PROMPTS[0], max_tokens=200, lane=long))
        client.send(submit(2, PROMPTS[1], max_tokens=3, lane=short))
        finished: list[int] = []
        for output in client.outputs():
            if output.finish is not None:
                finished.append(output.request_id)
            if len(finished) == 2:
                break
        assert finished == [2, 1]
