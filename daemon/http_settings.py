"""What the HTTP side is told of the configuration, at the start and at a reload.

Pure but for reading the file of keys. Raises `SparklaneError` when that file is of no use.
"""

from __future__ import annotations

from daemon.configuration import Configuration, api_keys, is_loopback
from daemon.edge import HttpSettings

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def http_settings(configuration: Configuration) -> HttpSettings:
    """The settings to start with."""
    settings = HttpSettings(maximum_body_bytes=configuration.server.maximum_body_bytes)
    update_settings(settings, configuration)
    return settings


def update_settings(settings: HttpSettings, configuration: Configuration) -> None:
    """Change what can be changed while serving; nothing, if the keys cannot be read."""
    server = configuration.server
    keys = api_keys(configuration)
    settings.api_keys = keys
    settings.allowed_hosts = _allowed_hosts(configuration)
    settings.cors_origins = frozenset(server.cors_origins)
    settings.keepalive_seconds = server.keepalive_seconds


def _allowed_hosts(configuration: Configuration) -> frozenset[str]:
    """Host headers to accept. Empty, which means all of them, for an address that others reach.

    There every caller has a key, which a web page that rebinds a name does not have.
    """
    server = configuration.server
    named = frozenset(name.lower() for name in server.allowed_hosts)
    if not named and not is_loopback(server.host):
        return frozenset()
    host = server.host.lower()
    return _LOCAL_NAMES | named | {f"[{host.strip('[]')}]" if ":" in host else host}
