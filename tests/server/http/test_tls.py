from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.http.tls import Tls
from tests.server.conftest import ServerUnderTest, over_socket

FILES = Path(__file__).parent / "certificates"
FIRST, SECOND = (
    {"ssl_certfile": f"{FILES}/{name}.crt", "ssl_keyfile": f"{FILES}/{name}.key"} for name in ("first", "second")
)
ENCRYPTED = {"ssl_certfile": FIRST["ssl_certfile"], "ssl_keyfile": f"{FILES}/encrypted.key"}
LIMIT = 2048
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"


def trusting(certificate: dict[str, str] = FIRST, own: dict[str, str] | None = None) -> ssl.SSLContext:
    """A client that knows the server by this certificate, and may have one of its own."""
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    if own is not None:
        context.load_cert_chain(own["ssl_certfile"], own["ssl_keyfile"])
    return context


def shake_hands(tls: Tls, client_context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLObject:
    """The client's end after a handshake in memory. Raises `ssl.SSLError` where either end refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        client.read()  # what has come after the handshake: tickets
    return client


def is_served(tls: Tls, certificate: dict[str, str]) -> bool:
    try:
        shake_hands(tls, trusting(certificate))
    except ssl.SSLCertVerificationError:
        return False
    return True


def put(certificate: dict[str, str], folder: Path) -> dict[str, str]:
    """Replace the files in a folder by renaming, as tools that renew certificates do."""
    names = {"ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
    for setting, name in names.items():
        shutil.copy(certificate[setting], folder / "new")
        os.rename(folder / "new", folder / name)
    return {setting: f"{folder}/{name}" for setting, name in names.items()}


def refresh(tls: Tls) -> None:
    """What two ticks do: the first one sees the change, the second that it has ended."""
    tls.refresh()
    tls.refresh()


async def test_clients_of_https():
    transport = httpx.AsyncHTTPTransport(verify=trusting())
    async with over_socket(**FIRST, transport=transport) as server, httpx.AsyncClient(verify=trusting()) as http:
        assert server.url.startswith("https://127.0.0.1:")
        assert (await server.http.get("/health")).status_code == 200
        async with server.openai(http_client=http) as client:
            body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 3}
            whole = (await client.completions.create(**body)).choices[0].text
            parts = [part.choices[0].text async for part in await client.completions.create(**body, stream=True)]
        assert len("".join(parts)) == len(whole) == 3
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with httpx.AsyncClient() as stranger:
                await stranger.get(f"{server.url}/health")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_certfile": "/nothing"}, "--ssl-certfile /nothing can't be read: No such file"),
        ({"ssl_certfile": FIRST["ssl_keyfile"]}, "--ssl-certfile .*first.key is not a PEM file with a certificate"),
        ({"ssl_certfile": FIRST["ssl_certfile"]}, "--ssl-certfile .*first.crt has no key .* with --ssl-keyfile"),
        (FIRST | {"ssl_keyfile": "/nothing"}, "--ssl-keyfile /nothing can't be read: No such file"),
        (FIRST | {"ssl_keyfile": SECOND["ssl_keyfile"]}, "--ssl-keyfile .*second.key has no key that can be used with"),
        (ENCRYPTED, "--ssl-keyfile .*encrypted.key is encrypted: .* --ssl-keyfile-password"),
        (ENCRYPTED | {"ssl_keyfile_password": "wrong"}, "--ssl-keyfile-password is not that of the key in"),
        (ENCRYPTED | {"ssl_keyfile_password": "s" * 2000}, "--ssl-keyfile-password can't be used: .* 1024 bytes"),
        (FIRST | {"ssl_ca_certs": "/nothing"}, "--ssl-ca-certs /nothing can't be read: No such file"),
        (FIRST | {"ssl_ca_certs": FIRST["ssl_keyfile"]}, "--ssl-ca-certs .*first.key is not a PEM file"),
        (FIRST | {"ssl_ciphers": "ROT13"}, "--ssl-ciphers ROT13 has no cipher that OpenSSL knows"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(settings: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        Tls(ServerConfig(**settings))


def test_the_password_opens_the_key_and_ciphers_are_used():
    tls = Tls(ServerConfig(**ENCRYPTED, ssl_keyfile_password="secret", ssl_ciphers="ECDHE-ECDSA-AES128-GCM-SHA256"))
    client = trusting()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    shake_hands(tls, client)
    client.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
    with pytest.raises(ssl.SSLError, match="NO_SHARED_CIPHER"):
        shake_hands(tls, client)


def test_a_renewed_certificate_is_served_to_new_connections(tmp_path: Path):
    tls = Tls(ServerConfig(**put(FIRST, tmp_path), enable_ssl_refresh=True))
    refresh(tls)
    assert is_served(tls, FIRST)
    put(SECOND, tmp_path)
    tls.refresh()
    assert is_served(tls, FIRST), "the files may not be complete"
    tls.refresh()
    assert is_served(tls, SECOND)
    assert not is_served(tls, FIRST)
    put(FIRST, tmp_path)
    refresh(tls)
    assert is_served(tls, FIRST)


def test_a_certificate_behind_links_is_renewed(tmp_path: Path):
    """As Kubernetes does: all files are links through one folder, which is a link that is replaced."""
    for version, certificate in (("1", FIRST), ("2", SECOND)):
        (tmp_path / version).mkdir()
        put(certificate, tmp_path / version)
    (tmp_path / "data").symlink_to("1")
    settings = {f"ssl_{kind}file": f"{tmp_path}/tls.{end}" for kind, end in (("cert", "crt"), ("key", "key"))}
    for path in map(Path, settings.values()):
        path.symlink_to(f"data/{path.name}")
    tls = Tls(ServerConfig(**settings, enable_ssl_refresh=True))
    assert is_served(tls, FIRST)
    (tmp_path / "new").symlink_to("2")
    os.rename(tmp_path / "new", tmp_path / "data")
    refresh(tls)
    assert is_served(tls, SECOND)


@pytest.mark.parametrize("broken", ["the certificate", "the key", "both are gone"])
def test_the_old_certificate_stays_until_the_files_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
):
    settings = put(FIRST, tmp_path)
    tls = Tls(ServerConfig(**settings, enable_ssl_refresh=True))
    put(SECOND, tmp_path)
    if broken == "both are gone":
        for path in settings.values():
            os.unlink(path)
    else:
        Path(settings["ssl_keyfile" if "key" in broken else "ssl_certfile"]).write_text("-----BEGIN")
    for _ in range(3):
        refresh(tls)
    assert is_served(tls, FIRST)
    [record] = caplog.records
    assert (record.levelname, "old certificate stays" in record.message) == ("ERROR", True)
    put(SECOND, tmp_path)
    refresh(tls)
    assert is_served(tls, SECOND)


def test_files_are_not_read_again_unless_asked_for(tmp_path: Path):
    tls = Tls(ServerConfig(**put(FIRST, tmp_path)))
    put(SECOND, tmp_path)
    refresh(tls)
    assert is_served(tls, FIRST)


@pytest.mark.parametrize("required", [0, 1, 2])
def test_certificates_of_clients(tmp_path: Path, required: int):
    authority = tmp_path / "authority.pem"
    shutil.copy(FIRST["ssl_certfile"], authority)
    settings = {"ssl_ca_certs": str(authority), "ssl_cert_reqs": required, "enable_ssl_refresh": True}
    tls = Tls(ServerConfig(**FIRST, **settings))

    def is_accepted(own: dict[str, str] | None) -> bool:
        try:
            shake_hands(tls, trusting(own=own))
        except ssl.SSLError:
            return False
        return True

    assert is_accepted(FIRST)
    assert is_accepted(None) == (required < 2)
    assert is_accepted(SECOND) == (required == 0)
    shutil.copy(SECOND["ssl_certfile"], authority)
    refresh(tls)
    assert is_accepted(SECOND)
    assert is_accepted(FIRST) == (required == 0), "an authority that is no longer in the file is not trusted"


@pytest.mark.parametrize("required", [0, 2])
def test_clients_whose_certificates_are_checked_resume_no_session(required: int):
    settings = {"ssl_ca_certs": FIRST["ssl_certfile"], "ssl_cert_reqs": required, "enable_ssl_refresh": True}
    tls, client = Tls(ServerConfig(**FIRST, **settings)), trusting(own=FIRST)
    resumed = shake_hands(tls, client, shake_hands(tls, client).session)
    assert resumed.session_reused == (required == 0)


async def test_a_client_that_speaks_no_tls_or_says_nothing_is_disconnected():
    transport = httpx.AsyncHTTPTransport(verify=trusting())
    async with over_socket(**FIRST, transport=transport, request_read_timeout=0.2) as server:
        for sent in (b"", GET + b"\r\n", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
            writer.write(sent)
            assert (await server.http.get("/health")).status_code == 200
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()


async def connect(server: ServerUnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port, ssl=trusting())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(GET + b"A: " + b"x" * LIMIT, 431), (GET, 408), (b"BREW / HTTP/1.1\r\n\r\n", 400)],
)
async def test_requests_that_never_become_complete_are_refused(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
):
    monkeypatch.setattr("jaxserve.server.http.connection.DISCARD_SECONDS", 0.2)
    async with over_socket(**FIRST, max_header_bytes=LIMIT, request_read_timeout=0.2) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        async with asyncio.timeout(30):
            assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


async def test_a_disconnect_aborts_the_request():
    async with over_socket(**FIRST) as server:
        server.engine.hold()
        _, writer = await connect(server)
        body = b'{"prompt": "a"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
        writer.close()
        await server.engine.wait_for(lambda: server.engine.num_running == 0)
        await server.state.idle.wait()
