"""Mutual TLS between services: a service's identity, from a folder, read again whenever its files change.

Both ends show a certificate of the deployment's own CA. A worker's certificate carries the DNS name `twostroke-worker`:
workers are met by address, and addresses come and go. Connections that are open keep what they began with.
"""

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from common.errors import ConfigError

log = logging.getLogger("twostroke.tls")

CERTIFICATE_FILE, KEY_FILE, CA_FILE = "tls.crt", "tls.key", "ca.crt"
"""As Kubernetes names the keys of a TLS secret, and cert-manager the one of the CA."""
_FILES = (CERTIFICATE_FILE, KEY_FILE, CA_FILE)

WORKER_NAME = "twostroke-worker"
"""In every worker's certificate, and in no other: what a client of a worker insists on."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """PEM. The certificate may be a chain, the leaf first; the CA file may hold several, as a change of CA needs."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes


def read_material(folder: Path) -> TlsMaterial:
    """Raises ConfigError, naming the file, when one is missing or broken, or when key and certificate differ."""
    material = _read(folder)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=_refuse_password)
    except (ssl.SSLError, OSError, ConfigError) as error:
        raise ConfigError(
            f"{folder / CERTIFICATE_FILE} and {folder / KEY_FILE} are no certificate with its key, unencrypted, in PEM "
            f"({error})"
        ) from None
    try:
        context.load_verify_locations(folder / CA_FILE)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{folder / CA_FILE} holds no CA certificate in PEM ({error})") from None
    if _read(folder) != material:  # what was checked is not what was read
        raise ConfigError(f"the files in {folder} are changing at this moment")
    return material


class TlsIdentity:
    """Callable from any thread: gRPC asks for the server's files in threads of its own."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the files are not usable; later changes that are not are logged and ignored."""
        self._folder = folder
        self._lock = threading.Lock()
        self._seen = _signature(folder)
        self._material = read_material(folder)
        self._version = 1
        self._served_version = 0

    @property
    def version(self) -> int:
        """Rises with every change of the files."""
        with self._lock:
            self._refresh()
            return self._version

    def server_credentials(self) -> grpc.ServerCredentials:
        """For one server. Clients need a certificate of the CA. The files are looked at before every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(self._material),
            cast(Any, self._changed_configuration),  # None, for no change, is missing in the stubs
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now; a channel keeps them for its life."""
        with self._lock:
            self._refresh()
            material = self._material
        return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as at the last handshake."""
        with self._lock:
            self._refresh()
            if self._served_version == self._version:
                return None
            self._served_version = self._version
            return _server_configuration(self._material)

    def _refresh(self) -> None:
        """Asked before every connection, so it costs little while nothing has changed."""
        signature = _signature(self._folder)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            material = read_material(self._folder)
        except ConfigError as error:
            log.error("the certificate in use stays: %s", error.message)
            return
        if material != self._material:
            self._material = material
            self._version += 1
            log.info("the certificate files in %s have changed; new connections use them", self._folder)


def load_identity(folder: Path | None) -> TlsIdentity | None:
    """None without a folder: no encryption. Raises ConfigError when its files are not usable."""
    return None if folder is None else TlsIdentity(folder)


def _signature(folder: Path) -> list[tuple[int, int, int] | None]:
    """Differs after every change of a file, whether it was written, replaced, or reached through another link."""
    return [_signature_of(folder / name) for name in _FILES]


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(folder: Path) -> TlsMaterial:
    return TlsMaterial(*(_read_file(folder / name) for name in _FILES))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _refuse_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ConfigError("the key is encrypted")


def _server_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)
