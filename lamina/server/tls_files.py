"""The files of ``--ssl-certfile`` and ``--ssl-keyfile``, checked before anything is started."""

from __future__ import annotations

import os
import ssl
import stat

from lamina.config.conflicts import SSL_CERTFILE, SSL_KEYFILE

_FOREIGN = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # the last one: RSA and EC


def check_tls_files(certfile: str, keyfile: str) -> None:
    """Raise ValueError, which names the flag and the file, unless a server can use them for TLS. Both may be ""."""
    if not certfile:
        return
    for flag, path in ((SSL_KEYFILE, keyfile), (SSL_CERTFILE, certfile)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}") from error
    if (mode := stat.S_IMODE(os.stat(keyfile).st_mode)) & 0o007:
        may = f"all users of this host may read it (mode {mode:04o})"
        raise ValueError(f"{SSL_KEYFILE} {keyfile}: {may}: chmod it to 0600")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certfile)
    except ssl.SSLError as error:
        raise ValueError(f"{SSL_CERTFILE} {certfile}: not a certificate in PEM") from error
    _check_pair(certfile, keyfile)


def _check_pair(certfile: str, keyfile: str) -> None:
    asked = list[bool]()

    def password() -> bytes:
        asked.append(True)
        return b""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password)
    except ssl.SSLError as error:
        if asked:
            said = f"{SSL_KEYFILE} {keyfile}: a password protects it: give a key without one"
        elif error.reason in _FOREIGN:
            said = f"{SSL_KEYFILE} {keyfile} is not the key of {SSL_CERTFILE} {certfile}"
        elif error.reason in (None, "PEM_LIB", "NO_START_LINE"):
            said = f"{SSL_KEYFILE} {keyfile}: not a private key in PEM"
        else:
            said = f"{SSL_CERTFILE} {certfile} cannot be used: {error.reason.lower().replace('_', ' ')}"
        raise ValueError(said) from error
