"""The configuration: one TOML file, decoded strictly, with the flags of `serve` laid over it.

Owns the schema, its defaults and its documentation (`describe`); pure but for reading the
file. Runs at start and again on SIGHUP. Whatever is wrong raises `SparklaneError` with the
code for configurations, in one line that names file, line, key, value and limit.
"""

from __future__ import annotations

import enum
import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from daemon.draft_section import DraftSection, SpeculationMode, settled_draft
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.toml_lines import line_of

DEFAULT_MODEL = "smollm2-135m"

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]
Positive = Annotated[float, Meta(gt=0.0)]


class LogLevel(enum.StrEnum):
    """What is written to the log: this and everything more serious."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Precision(enum.StrEnum):
    """What weights are computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    EIGHT_BIT = "8-bit"
    FOUR_BIT = "4-bit"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ServerSection(Section, frozen=True):
    """Where and how HTTP is served."""

    host: Annotated[str, Meta(description="Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port; 0 takes any free one.")] = 8090
    api_keys_file: Annotated[
        str | None,
        Meta(description="File with one API key a line; without it no key is asked for."),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Host headers to accept besides the local ones and `host`."),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Origins that browsers may call from; none by default.")
    ] = ()
    maximum_body_bytes: Annotated[Count, Meta(description="Largest request body.")] = 8_388_608
    keepalive_seconds: Annotated[
        Seconds, Meta(description="Pause after which a silent stream gets a comment; 0 = never.")
    ] = 10.0
    grace_seconds: Annotated[
        Seconds, Meta(description="Time that accepted requests get to finish on SIGTERM.")
    ] = 30.0


class ModelSection(Section, frozen=True):
    """A model to serve. One `[[models]]` for each."""

    name: Annotated[str, Meta(description="Name that requests use.", min_length=1)]
    checkpoint: Annotated[
        str | None,
        Meta(description="Name to pull, or path of a checkpoint folder; the name by default."),
    ] = None
    precision: Annotated[
        Precision, Meta(description="What to compute in; `auto` suits the machine.")
    ] = Precision.AUTO
    maximum_rows: Annotated[Count, Meta(description="Most requests decoded together.")] = 8
    prefill_milliseconds: Annotated[
        Positive, Meta(description="Time of one prompt chunk while other requests decode.")
    ] = 100.0
    maximum_context: Annotated[
        Count | None,
        Meta(description="Most tokens of prompt and answer; the model's own by default."),
    ] = None
    # None in a file stands for the drafter that the model comes with, if it has one.
    draft: DraftSection | None = None

    @property
    def source(self) -> str:
        """What to look for: a path or a name."""
        return self.checkpoint or self.name


class QueueSection(Section, frozen=True):
    """What may wait, for each model."""

    requests: Annotated[CountOrNone, Meta(description="Most requests that wait.")] = 256
    prompt_tokens: Annotated[
        Count, Meta(description="Most prompt tokens that wait, all requests together.")
    ] = 262_144


class EngineSection(Section, frozen=True):
    """When an engine process counts as lost."""

    load_seconds: Annotated[
        Positive, Meta(description="Time that loading and warming up may take.")
    ] = 600.0
    wedge_seconds: Annotated[
        Positive, Meta(description="Time without a step, with work pending, before a kill.")
    ] = 60.0
    heartbeat_seconds: Annotated[
        Positive, Meta(description="Time without a heartbeat before a kill.")
    ] = 30.0
    maximum_restarts: Annotated[
        CountOrNone, Meta(description="Restarts in the window before a model is marked down.")
    ] = 3
    restart_window_seconds: Annotated[
        Positive, Meta(description="Window in which restarts are counted.")
    ] = 60.0


class LogSection(Section, frozen=True):
    """What is logged."""

    level: Annotated[LogLevel, Meta(description="Least serious level that is logged.")] = (
        LogLevel.INFO
    )


class MemorySection(Section, frozen=True):
    """What memory may be used."""

    limit_bytes: Annotated[
        Count | None, Meta(description="Limit to plan with; what is available by default.")
    ] = None
    reserve_bytes: Annotated[
        CountOrNone, Meta(description="Memory to leave to everything else.")
    ] = 256_000_000


class Configuration(Section, frozen=True):
    """The whole file."""

    server: ServerSection = ServerSection()
    models: tuple[ModelSection, ...] = (ModelSection(name=DEFAULT_MODEL),)
    queue: QueueSection = QueueSection()
    engine: EngineSection = EngineSection()
    log: LogSection = LogSection()
    memory: MemorySection = MemorySection()


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; None = nothing. `model` is a name, an org/repo or a path.

    `draft_model` is a drafter for every model that is served; the other flags of drafting change
    what the file says of one.
    """

    model: str | None = None
    host: str | None = None
    port: int | None = None
    draft_model: str | None = None
    draft_bits: int | None = None
    draft_own_head: bool | None = None
    draft_shortlist: bool | None = None
    num_draft_tokens: int | None = None
    confidence_threshold: float | None = None
    speculation: SpeculationMode | None = None

    def drafting(self) -> dict[str, Any]:
        """The fields of a drafter's section that are to be changed."""
        wanted = {
            "checkpoint": self.draft_model,
            "bits": self.draft_bits,
            "own_head": self.draft_own_head,
            "shortlist": self.draft_shortlist,
            "maximum_tokens": self.num_draft_tokens,
            "confidence_threshold": self.confidence_threshold,
            "speculation": self.speculation,
        }
        return {field: value for field, value in wanted.items() if value is not None}


class Documented(msgspec.Struct, frozen=True):
    """One key for the README: where it stands, its default, what it does."""

    section: str
    key: str
    default: str
    description: str


def load(path: Path | None, flags: Flags | None = None) -> Configuration:
    """The configuration of a file, or the defaults without one, under the flags."""
    text = "" if path is None else _read(path)
    return decode(text, str(path or "the defaults"), flags)


def decode(text: str, source: str, flags: Flags | None = None) -> Configuration:
    """The configuration that `text` says; `source` names it in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"{source}: {error}") from error
    try:
        configuration = msgspec.convert(table, Configuration)
    except msgspec.ValidationError as error:
        message, path = _split(str(error))
        line = line_of(text, path)
        where = f"{source}:{line}" if line else source
        key = ".".join(str(part) for part in path if not isinstance(part, int))
        raise _wrong(f"{where}: {key}: {message}" if key else f"{where}: {message}") from error
    configuration = _with_flags(configuration, flags or Flags())
    _check(configuration, source)
    return configuration


def api_keys(configuration: Configuration) -> frozenset[str]:
    """The keys in the file that the configuration names; empty when it names none."""
    if configuration.server.api_keys_file is None:
        return frozenset()
    path = Path(configuration.server.api_keys_file).expanduser()
    lines = (line.strip() for line in _read(path).splitlines())
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise _wrong(f"{path}: no API key in it; write one a line, or drop server.api_keys_file")
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def describe() -> list[Documented]:
    """Every key, in the order of the schema."""
    rows = []
    for section, kind in get_type_hints(Configuration).items():
        many = get_origin(kind) is tuple
        schema = get_args(kind)[0] if many else kind
        rows += _documented(schema, f"[[{section}]]" if many else f"[{section}]")
    return rows + _documented(DraftSection, "[models.draft]")


def _documented(schema: type, name: str) -> list[Documented]:
    rows = []
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        notes = getattr(hints[field.name], "__metadata__", ())
        descriptions = [n.description for n in notes if isinstance(n, Meta) and n.description]
        # A section within a section has rows of its own.
        if descriptions:
            rows.append(Documented(name, field.name, _default(field), descriptions[0]))
    return rows


def reloadable_changes(old: Configuration, new: Configuration) -> tuple[Configuration, list[str]]:
    """What a running daemon can take over of `new`, and the keys that need a restart.

    Queue limits, the log level, the file of keys, allowed hosts, origins, the keep-alive and
    the grace period can be changed while serving.
    """
    server = msgspec.structs.replace(
        old.server, **{name: getattr(new.server, name) for name in _RELOADABLE}
    )
    applied = msgspec.structs.replace(old, server=server, queue=new.queue, log=new.log)
    kept = [
        f"{section}.{field}"
        for section in ("server", "engine", "memory")
        for field in msgspec.structs.asdict(getattr(new, section))
        if getattr(getattr(applied, section), field) != getattr(getattr(new, section), field)
    ]
    if applied.models != new.models:
        kept.append("models")
    return applied, kept


_RELOADABLE = (
    "api_keys_file",
    "allowed_hosts",
    "cors_origins",
    "keepalive_seconds",
    "grace_seconds",
)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise _wrong(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error


def _wrong(message: str) -> SparklaneError:
    return SparklaneError(message, ExitCode.CONFIGURATION)


def _with_flags(configuration: Configuration, flags: Flags) -> Configuration:
    server = configuration.server
    if flags.host is not None:
        server = msgspec.structs.replace(server, host=flags.host)
    if flags.port is not None:
        server = msgspec.structs.replace(server, port=flags.port)
    models = configuration.models
    if flags.model is not None:
        # A model of the file keeps what the file says of it; anything else is served as it is.
        named = [model for model in models if flags.model in (model.name, model.checkpoint)]
        is_path = flags.model.startswith((".", "/", "~"))
        name = Path(flags.model).expanduser().resolve().name if is_path else flags.model
        models = (*named, ModelSection(name=name, checkpoint=flags.model))[:1]
    drafting = flags.drafting()
    models = tuple(
        msgspec.structs.replace(model, draft=settled_draft(model.source, model.draft, drafting))
        for model in models
    )
    return msgspec.structs.replace(configuration, server=server, models=models)


def _check(configuration: Configuration, source: str) -> None:
    """What no single value shows."""
    server = configuration.server
    if not 0 <= server.port <= 65535:
        raise _wrong(f"{source}: server.port is {server.port}; it must be from 0 to 65535")
    if not configuration.models:
        raise _wrong(f"{source}: models is empty; name at least one, or leave it out")
    names = [model.name for model in configuration.models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _wrong(f"{source}: two models have the name {min(twice)!r}; names must differ")
    if not is_loopback(server.host) and server.api_keys_file is None:
        raise _wrong(
            f"{source}: server.host is {server.host}, which others can reach, and there are no "
            "API keys; set server.api_keys_file, or use 127.0.0.1"
        )


def _split(message: str) -> tuple[str, list[str | int]]:
    """msgspec's "problem - at `$.a[0].b`" as a problem and a path.

    For an unknown key the key stands in the problem; it is appended to the path.
    """
    problem, _, place = message.partition(" - at `$")
    path: list[str | int] = []
    for part in place.rstrip("`").replace("[", ".[").split("."):
        if part.startswith("["):
            path.append(int(part.strip("[]")))
        elif part:
            path.append(part)
    if problem.startswith("Object contains unknown field `"):
        path.append(problem.split("`")[1])
        return "unknown key", path
    if problem.startswith("Object missing required field `"):
        return f"the key {problem.split('`')[1]!r} is missing", path
    return problem[:1].lower() + problem[1:], path


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
