"""The one place that reads the environment: SIE_STREAM_<NAME>, over a TOML file, over the defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sie_stream.errors import ConfigError
from sie_stream.settings import Settings, settings_from

PREFIX = "SIE_STREAM_"
CLIENT_PREFIX = "SIE_STREAM_KAFKA__"
"""SIE_STREAM_KAFKA__SECURITY_PROTOCOL=SSL becomes librdkafka's security.protocol."""
NOT_SETTINGS = ("SIE_STREAM_SETTINGS_FILE",)


def load_settings(overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Defaults, then SIE_STREAM_SETTINGS_FILE (or ./sie-stream.toml), then the environment, then `overrides`.

    Raises ConfigError naming the setting.
    """
    env = os.environ if environ is None else environ
    values: dict[str, object] = dict(_file_values(env))
    client: dict[str, object] = dict(values.pop("client_overrides", {}))  # type: ignore[call-overload]  # TOML table
    for name, text in env.items():
        if name.startswith(CLIENT_PREFIX):
            client[name[len(CLIENT_PREFIX) :].lower().replace("_", ".")] = text
        elif name.startswith(PREFIX) and name not in NOT_SETTINGS:
            values[name[len(PREFIX) :].lower()] = text
    if client:
        values["client_overrides"] = {key: str(value) for key, value in client.items()}
    values.update(overrides or {})
    return settings_from(values)


def _file_values(env: Mapping[str, str]) -> Mapping[str, object]:
    named = env.get("SIE_STREAM_SETTINGS_FILE")
    path = Path(named) if named else Path("sie-stream.toml")
    if not path.exists():
        if named:
            raise ConfigError(f"SIE_STREAM_SETTINGS_FILE = {named!r}: no such file")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def settings_environment(settings: Settings) -> dict[str, str]:
    """The environment that makes a child process load exactly these settings."""
    defaults = Settings()
    env: dict[str, str] = {}
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        if name == "client_overrides":
            for key, text in value.items():
                env[CLIENT_PREFIX + key.upper().replace(".", "_")] = text
        elif value != getattr(defaults, name):
            env[PREFIX + name.upper()] = str(value)
    return env
