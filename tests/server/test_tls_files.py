"""Errors of TLS files: each names the flag and the file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from running import certificate

from lamina.server.tls_files import check_tls_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and its key, key2.pem of another one, and files that are neither."""
    folder, other = tmp_path_factory.mktemp("tls"), tmp_path_factory.mktemp("other")
    made = certificate(folder)
    Path(certificate(other)["ssl_keyfile"]).rename(folder / "key2.pem")
    (folder / "text.pem").write_text("text")
    curve = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run([*curve, "-out", folder / "curve.pem"], check=True, capture_output=True)
    locked = ["openssl", "pkey", "-in", made["ssl_keyfile"], "-aes128", "-passout", "pass:word"]
    subprocess.run([*locked, "-out", folder / "locked.pem"], check=True, capture_output=True)
    for path in folder.iterdir():
        path.chmod(0o600)
    return folder


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("none.pem", "key.pem", "--ssl-certfile none.pem: No such file or directory"),
        ("cert.pem", "none.pem", "--ssl-keyfile none.pem: No such file or directory"),
        (".", "key.pem", "--ssl-certfile .: Is a directory"),
        ("text.pem", "key.pem", "--ssl-certfile text.pem: not a certificate in PEM"),
        ("key.pem", "key.pem", "--ssl-certfile key.pem: not a certificate in PEM"),
        ("cert.pem", "text.pem", "--ssl-keyfile text.pem: not a private key in PEM"),
        ("cert.pem", "key2.pem", "--ssl-keyfile key2.pem is not the key of --ssl-certfile cert.pem"),
        ("cert.pem", "curve.pem", "--ssl-keyfile curve.pem is not the key of --ssl-certfile cert.pem"),
        ("cert.pem", "locked.pem", "--ssl-keyfile locked.pem: a password protects it: give a key without one"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    folder: Path, cert: str, key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError) as caught:
        check_tls_files(cert, key)
    assert str(caught.value) == said


def test_files_that_fit_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    check_tls_files("cert.pem", "key.pem")
    check_tls_files("", "")
