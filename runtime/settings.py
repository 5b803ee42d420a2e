"""The settings file: YAML, checked key by key, unknown keys refused with the likeliest right one.

Precedence is flags > environment (POTLUCK_*) > file > default; click does that, once the file's values are its
defaults (`defaults_for`). configs/potluck.yaml explains every key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec
import yaml
from msgspec import Meta

from potluck.wire.errors import SettingsError
from potluck.wire.plain import convert

Port = Annotated[int, Meta(ge=0, le=65_535)]
FILE_BYTES = 1 << 20
PAGE = "configs/potluck.yaml"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of one part of the file; None means "not set here"."""


class Node(_Section, frozen=True):
    """This machine."""

    name: str | None = None
    network_interface: str | None = None
    listen_port: Port | None = None
    listen_address: str | None = None


class Discovery(_Section, frozen=True):
    """How broker and stages find each other."""

    enabled: bool | None = None
    interval_seconds: Annotated[float, Meta(ge=1, le=3600)] | None = None
    peers: tuple[str, ...] = ()


class Resources(_Section, frozen=True):
    """What this machine gives."""

    max_memory_gb: Annotated[float, Meta(gt=0)] | None = None
    max_vram_gb: Annotated[float, Meta(ge=0)] | None = None
    vram_pool_size: Annotated[float, Meta(ge=0)] | None = None
    allow_cpu_fallback: bool = True
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    mlock: bool = False


class TransportSettings(_Section, frozen=True):
    """How activations travel."""

    activation: Literal["auto", "f32", "f16"] | None = None


class Compute(_Section, frozen=True):
    """How the engines compute."""

    exact: bool | None = None


class Health(_Section, frozen=True):
    """When a stage is lost."""

    heartbeat_seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None
    misses: Annotated[int, Meta(ge=1, le=1000)] | None = None
    drain_timeout_seconds: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    standby: tuple[str, ...] = ()


class Requests(_Section, frozen=True):
    """How long requests may take."""

    timeout_seconds: Annotated[float, Meta(ge=0, le=604_800)] | None = None


class Security(_Section, frozen=True):
    """Keys and certificates."""

    tls_enabled: bool = False
    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    api_keys_file: str | None = None


class JobSettings(_Section, frozen=True):
    """Requests that survive the broker."""

    enabled: bool = True
    journal: str | None = None
    keep_hours: Annotated[float, Meta(ge=0, le=87_600)] | None = None


class Logging(_Section, frozen=True):
    """Where the log goes."""

    level: Literal["debug", "info", "warning", "error"] | None = None
    file: str | None = None
    max_size_mb: Annotated[int, Meta(ge=1)] = 100
    max_files: Annotated[int, Meta(ge=1)] = 5


class Settings(_Section, frozen=True):
    """The whole file."""

    node: Node = Node()
    discovery: Discovery = Discovery()
    resources: Resources = Resources()
    layer_assignment: dict[str, tuple[int, int]] = {}
    transport: TransportSettings = TransportSettings()
    compute: Compute = Compute()
    health: Health = Health()
    requests: Requests = Requests()
    jobs: JobSettings = JobSettings()
    security: Security = Security()
    logging: Logging = Logging()


def load_settings(path: Path) -> Settings:
    """The file's settings. Raises SettingsError naming file and key."""
    return parse_settings(read_yaml(path, "--config", PAGE), str(path))


def read_yaml(path: Path, option: str, page: str) -> Any:
    """A YAML file as plain data. `option` named the file, `page` shows what such a file looks like.

    Raises SettingsError naming the file, and the line where there is one.
    """
    try:
        text = path.read_bytes()[: FILE_BYTES + 1]
    except OSError as error:
        raise SettingsError(
            f"Can't read {path}: {error.strerror}.", hint=f"Check the path given with {option}."
        ) from error
    if len(text) > FILE_BYTES:
        raise SettingsError(f"{path} is larger than {FILE_BYTES} bytes.", hint=f"Compare it with {page}.")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"{path} is not valid YAML{where}.", hint=f"Compare it with {page}.") from error


def parse_settings(raw: Any, source: str) -> Settings:
    """Settings from plain data. Raises SettingsError naming source and key."""
    return Settings() if raw is None else convert(raw, Settings, source, PAGE)


def check_kept(settings: Settings) -> None:
    """Raises SettingsError for keys that this version reads but can't keep, and on which somebody's safety may rest."""
    if settings.security != Security():
        raise SettingsError(
            "This version has no TLS, no keys and no API keys yet, so the section security can't be kept.",
            hint="Take the section out, and run Potluck on a network you trust, with the REST API on the loopback.",
        )


def defaults_for(settings: Settings) -> dict[str, Any]:
    """The file's values under the names of the commands' options; those not set are left out."""
    activation = settings.transport.activation
    named = {
        "name": settings.node.name,
        "listen_address": settings.node.listen_address,
        "port": settings.node.listen_port,
        "network_interface": settings.node.network_interface,
        "discovery": settings.discovery.enabled,
        "discovery_interval": settings.discovery.interval_seconds,
        "peers": list(settings.discovery.peers) or None,
        "threads": settings.resources.threads,
        "max_memory_gb": settings.resources.max_memory_gb,
        "max_vram_gb": settings.resources.max_vram_gb,
        "vram_pool_gb": settings.resources.vram_pool_size,
        "cpu_fallback": None if settings.resources.allow_cpu_fallback else False,
        "mlock": settings.resources.mlock or None,
        "activation": activation,
        "exact": settings.compute.exact,
        "layers": [f"{name}={first}-{last}" for name, (first, last) in settings.layer_assignment.items()]
        or None,
        "heartbeat": settings.health.heartbeat_seconds,
        "misses": settings.health.misses,
        "drain_timeout": settings.health.drain_timeout_seconds,
        "request_timeout": settings.requests.timeout_seconds,
        "reserve": list(settings.health.standby) or None,
        "no_journal": None if settings.jobs.enabled else True,
        "journal": settings.jobs.journal,
        "jobs_keep_hours": settings.jobs.keep_hours,
        "log_level": settings.logging.level,
        "log_file": settings.logging.file,
        "log_max_size_mb": settings.logging.max_size_mb if settings.logging.file else None,
        "log_max_files": settings.logging.max_files if settings.logging.file else None,
    }
    return {key: value for key, value in named.items() if value is not None}


def config_option(function: Any) -> Any:
    """`--config FILE` for a click command: read first, so that its values become the other options' defaults."""

    def read(context: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            settings = load_settings(value)
            context.default_map = {**(context.default_map or {}), **defaults_for(settings)}
            check_kept(settings)
        return value

    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        callback=read,
        envvar="POTLUCK_CONFIG",
        help="Settings file (YAML).",
    )(function)
