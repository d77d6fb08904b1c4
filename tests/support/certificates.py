"""Certificate authorities and identities for tests of mutual TLS, made by the openssl program."""

import functools
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, WORKER_NAME

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


class Authority:
    """Held in memory; openssl reads it from a folder that is gone afterwards."""

    def __init__(self, name: str) -> None:
        with TemporaryDirectory(prefix="authority-") as scratch:
            key, certificate = Path(scratch, "ca.key"), Path(scratch, "ca.crt")
            _openssl("req", "-x509", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate)
            self._key, self._certificate = key.read_bytes(), certificate.read_bytes()

    def issue(self, folder: Path, name: str = WORKER_NAME) -> Path:
        """A key and a certificate for the DNS name `name`, and our own certificate, as a service wants them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CA_FILE).write_bytes(self._certificate)
        with TemporaryDirectory(prefix="authority-") as scratch:
            key = Path(scratch, "ca.key")
            key.write_bytes(self._key)
            _openssl(
                *("req", "-x509", *_KEY, "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"),
                *("-addext", "basicConstraints=critical,CA:FALSE", "-CA", folder / CA_FILE, "-CAkey", key),
                *("-keyout", folder / KEY_FILE, "-out", folder / CERTIFICATE_FILE),
            )
        return folder


@functools.cache
def authority(name: str) -> Authority:
    """Made once for all tests of a run."""
    return Authority(name)


def replace_files(folder: Path, source: Path) -> None:
    """As Kubernetes does: each file is whole at any moment."""
    for name in (CERTIFICATE_FILE, KEY_FILE, CA_FILE):
        fresh = folder / f".{name}"
        shutil.copy(source / name, fresh)
        fresh.replace(folder / name)


def _openssl(*arguments: str | Path) -> None:
    executable = shutil.which("openssl")
    if executable is None:
        pytest.fail("openssl is not installed; install it (Debian: apt-get install openssl)")
    result = subprocess.run([executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
