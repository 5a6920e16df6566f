"""The configuration: strictness, messages with lines, flags, reloading, documentation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.catalog import DEFAULT_MODEL, EMBEDDED_DRAFTERS
from daemon.configuration import (
    Configuration,
    Flags,
    Precision,
    api_keys,
    decode,
    describe,
    is_loopback,
    load,
    reloadable_changes,
)
from daemon.draft_section import EMBEDDED_DRAFTER_OF, DraftSection, SpeculationMode
from daemon.exit_codes import ExitCode, SparklaneError

FULL = """\
# everything that can be set
[server]
host = "127.0.0.1"
port = 9000
keepalive_seconds = 5

[[models]]
name = "chat"
checkpoint = "org/chat"
precision = "4-bit"

[[models]]
name = "small"
maximum_rows = 2

[queue]
requests = 10
"""


def refused(text: str, flags: Flags | None = None) -> str:
    with pytest.raises(SparklaneError) as error:
        decode(text, "sparklane.toml", flags)
    assert error.value.exit_code == ExitCode.CONFIGURATION
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_defaults_serve_the_embedded_model() -> None:
    (model,) = load(None).models
    assert (model.name, model.source) == (DEFAULT_MODEL, DEFAULT_MODEL)
    assert is_loopback(load(None).server.host)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparklane.toml"
    path.write_text(FULL)
    configuration = load(path)
    assert configuration.server.port == 9000
    assert configuration.server.keepalive_seconds == 5.0
    assert [model.source for model in configuration.models] == ["org/chat", "small"]
    assert configuration.models[0].precision is Precision.FOUR_BIT
    assert configuration.queue.requests == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("port = 9000", "prot = 9000"), ["sparklane.toml:4", "server.prot", "unknown key"]),
        (("port = 9000", "port = 70000"), ["sparklane.toml:4", "server.port", "65535"]),
        (("port = 9000", 'port = "http"'), ["sparklane.toml:4", "server.port", "int"]),
        (("maximum_rows = 2", "maximum_rows = 0"), ["sparklane.toml:14", "models.maximum_rows"]),
        (("maximum_rows = 2", "rows = 2"), ["sparklane.toml:14", "models.rows"]),
        (('precision = "4-bit"', 'precision = "3-bit"'), ["sparklane.toml:10", "3-bit"]),
        (('name = "small"\n', ""), ["sparklane.toml:12", "'name' is missing"]),
        (("[queue]", "[queues]"), ["sparklane.toml:16", "queues", "unknown key"]),
        (("requests = 10", "requests = -1"), ["sparklane.toml:17", "queue.requests"]),
        (('name = "small"', 'name = "chat"'), ["chat", "names must differ"]),
        (("port = 9000", "port ="), ["sparklane.toml", "line 4"]),
    ],
)
def test_what_is_wrong_is_told_with_key_and_line(change: tuple[str, str], words: list[str]) -> None:
    assert change[0] in FULL
    message = refused(FULL.replace(*change, 1))
    for word in words:
        assert word in message, message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SparklaneError, match=r"absent\.toml: cannot be read") as error:
        load(tmp_path / "absent.toml")
    assert error.value.exit_code == ExitCode.CONFIGURATION


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_one_line_of_error(text: str) -> None:
    try:
        decode(text, "random")
    except SparklaneError as error:
        assert error.exit_code == ExitCode.CONFIGURATION


def test_flags_win_over_the_file() -> None:
    configuration = decode(FULL, "test", Flags(host="localhost", port=1234))
    assert (configuration.server.host, configuration.server.port) == ("localhost", 1234)
    assert len(configuration.models) == 2


def test_the_model_flag_takes_the_files_words_about_it() -> None:
    for flag in ("chat", "org/chat"):
        (model,) = decode(FULL, "test", Flags(model=flag)).models
        assert (model.name, model.precision) == ("chat", Precision.FOUR_BIT)


def test_the_model_flag_can_name_anything_else() -> None:
    (model,) = decode(FULL, "test", Flags(model="org/other")).models
    assert (model.name, model.source) == ("org/other", "org/other")
    (model,) = decode(FULL, "test", Flags(model="/data/checkpoints/mine/")).models
    assert (model.name, model.source) == ("mine", "/data/checkpoints/mine/")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_keys(host: str) -> None:
    assert "server.api_keys_file" in refused("", Flags(host=host))
    with_keys = decode('[server]\napi_keys_file = "keys"', "test", Flags(host=host))
    assert with_keys.server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert decode("", "test", Flags(host=host)).server.host == host


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    configuration = decode(f'[server]\napi_keys_file = "{path}"', "test")
    path.write_text("# ours\n first \n\nsecond\n")
    assert api_keys(configuration) == {"first", "second"}
    assert api_keys(Configuration()) == frozenset()
    path.write_text("# none\n")
    with pytest.raises(SparklaneError, match="no API key"):
        api_keys(configuration)
    path.unlink()
    with pytest.raises(SparklaneError, match="cannot be read"):
        api_keys(configuration)


def test_reloading_takes_what_it_can_and_names_the_rest() -> None:
    old = decode(FULL, "test")
    changed = FULL.replace("requests = 10", "requests = 20").replace("9000", "9001")
    new = decode(changed + '\n[log]\nlevel = "debug"\n[engine]\nwedge_seconds = 5\n', "test")
    applied, kept = reloadable_changes(old, new)
    assert applied.queue.requests == 20
    assert applied.log.level == "debug"
    assert applied.server.port == 9000
    assert sorted(kept) == ["engine.wedge_seconds", "server.port"]
    fewer = msgspec.structs.replace(old, models=old.models[:1])
    assert reloadable_changes(old, fewer) == (old, ["models"])
    assert reloadable_changes(old, old) == (old, [])


def test_every_key_is_documented_and_its_default_is_the_schemas() -> None:
    rows = describe()
    sections = {row.section.strip("[]") for row in rows}
    assert sections == {*Configuration.__struct_fields__, "models.draft"}
    text, section = "", ""
    for row in rows:
        assert row.description.endswith("."), row
        if row.section != section:
            section = row.section
            text += f"{section}\n"
        if row.default == "required":
            text += f'{row.key} = "{DEFAULT_MODEL}"\n'
        elif row.default != "none":
            text += f"{row.key} = {row.default}\n"
    found = decode(text, "the documented defaults")
    (model,) = found.models
    assert model.draft == DraftSection(checkpoint=EMBEDDED_DRAFTER_OF[DEFAULT_MODEL])
    plain = msgspec.structs.replace(found, models=(msgspec.structs.replace(model, draft=None),))
    assert plain == Configuration()


def test_flags_of_drafting_make_or_change_a_drafter() -> None:
    flags = Flags(draft_model="/d", draft_bits=8, num_draft_tokens=3)
    (model,) = decode("", "flags", flags).models
    assert model.draft == DraftSection(checkpoint="/d", bits=8, maximum_tokens=3)
    text = '[[models]]\nname = "a"\n[models.draft]\ncheckpoint = "/f"\nbits = 4\n'
    (model,) = decode(text, "file", Flags(speculation=SpeculationMode.OFF)).models
    assert model.draft is not None
    assert (model.draft.bits, model.draft.speculation) == (4, SpeculationMode.OFF)
    assert model.draft.shortlist
    (model,) = decode(text, "file", Flags(draft_shortlist=False)).models
    assert model.draft is not None and not model.draft.shortlist
    with pytest.raises(SparklaneError, match="checkpoint"):
        decode("", "flags", Flags(model="org/chat", draft_bits=8))


EMBEDDED = DraftSection(checkpoint="smollm2-135m-drafter")
OFF = Flags(speculation=SpeculationMode.OFF)


@pytest.mark.parametrize(
    ("text", "flags", "draft"),
    [
        ("", Flags(), EMBEDDED),
        ("", Flags(model=DEFAULT_MODEL), EMBEDDED),
        ('[[models]]\nname = "a"\ncheckpoint = "smollm2-135m"\n', Flags(), EMBEDDED),
        ("", OFF, msgspec.structs.replace(EMBEDDED, speculation=SpeculationMode.OFF)),
        (
            '[[models]]\nname = "smollm2-135m"\n[models.draft]\nspeculation = "off"\n',
            Flags(),
            msgspec.structs.replace(EMBEDDED, speculation=SpeculationMode.OFF),
        ),
        ("", Flags(draft_bits=8), msgspec.structs.replace(EMBEDDED, bits=8)),
        ("", Flags(draft_model="/mine"), DraftSection(checkpoint="/mine")),
        # Who names a folder gets what is in the folder.
        ("", Flags(model="/cache/checkpoints/smollm2-135m"), None),
        ("", Flags(model="org/chat"), None),
        # Nothing to turn off.
        ("", Flags(model="org/chat", speculation=SpeculationMode.OFF), None),
    ],
)
def test_the_embedded_model_drafts_unless_told_otherwise(
    text: str, flags: Flags, draft: DraftSection | None
) -> None:
    assert decode(text, "file", flags).models[0].draft == draft


def test_a_model_that_is_to_draft_needs_a_drafter() -> None:
    text = '[[models]]\nname = "org/chat"\n[models.draft]\nbits = 4\n'
    with pytest.raises(SparklaneError, match=r"models\.draft\.checkpoint") as error:
        decode(text, "file")
    assert error.value.exit_code == ExitCode.CONFIGURATION
    (model,) = decode(text + 'speculation = "off"\n', "file").models
    assert model.draft is not None and model.draft.checkpoint is None


def test_the_embedded_drafter_is_one_that_is_found_by_name() -> None:
    assert set(EMBEDDED_DRAFTER_OF) == {DEFAULT_MODEL}
    assert set(EMBEDDED_DRAFTER_OF.values()) <= set(EMBEDDED_DRAFTERS)
