"""The TLS of new connections: makes contexts from the files and settings, and replaces them when the files change.

Owns the errors of these files, which name the flag at fault. Accepts no connection.
"""

from __future__ import annotations

import logging
import os
import ssl

from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.server")


class Tls:
    """`context` is for listeners; with `enable_ssl_refresh`, its connections use the files as they are now. Raises
    `ConfigError` if a file can't be used."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._seen = self._read = self._state_of_files()
        self.context = self._newest = _make_context(config)
        if config.enable_ssl_refresh:
            self.context.sni_callback = self._use_newest  # also called without a server name
            if config.ssl_cert_reqs:
                # A session that is resumed doesn't show its certificate, though its authority may be removed by then
                self.context.num_tickets = 0

    def refresh(self) -> None:
        """Read the files again if they have changed, but not since the last call: half of them may be written."""
        if not self._config.enable_ssl_refresh:
            return
        now = self._state_of_files()
        if now != self._seen:
            self._seen = now
        elif now != self._read:
            self._read = now
            try:
                self._newest = _make_context(self._config)
            except ConfigError as error:
                logger.error("The files of TLS have changed, but the old certificate stays in use: %s", error)
            else:
                logger.info("New connections use the changed certificate of %s", self._config.ssl_certfile)

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _state_of_files(self) -> list[tuple[int, ...] | None]:
        """Return what differs after a file, or a link to it, is replaced; None for a file that can't be found."""
        paths = (self._config.ssl_certfile, self._config.ssl_keyfile, self._config.ssl_ca_certs)
        return [_state_of(path) for path in paths if path is not None]


def make_tls(config: ServerConfig) -> Tls | None:
    """Return the TLS of a server, None if it speaks plain HTTP. Raises `ConfigError` if a file can't be used."""
    return None if config.ssl_certfile is None else Tls(config)


def _state_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _make_context(config: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert config.ssl_certfile is not None
    _load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--ssl-certfile", config.ssl_certfile)
    _load_key(context, config)
    if config.ssl_ca_certs is not None:
        _load_certificates(context, "--ssl-ca-certs", config.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers} has no cipher that OpenSSL knows") from error
    return context


def _load_certificates(context: ssl.SSLContext, flag: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {path} is not a PEM file with a certificate: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be read: {error.strerror}") from error


def _load_key(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the certificate, which is known to be one, and its key."""
    key, password = config.ssl_keyfile, config.ssl_keyfile_password
    flag = f"--ssl-certfile {config.ssl_certfile}" if key is None else f"--ssl-keyfile {key}"
    is_encrypted = False

    def give_password() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        return password or ""

    try:
        if key is not None:
            open(key, "rb").close()  # whose error is the key's, not the certificate's
        context.load_cert_chain(str(config.ssl_certfile), key, give_password)
    except ssl.SSLError as error:
        if is_encrypted and password is None:
            raise ConfigError(
                f"the key in {flag} is encrypted: give its password with --ssl-keyfile-password"
            ) from None
        if is_encrypted and "MISMATCH" not in str(error):
            raise ConfigError(f"--ssl-keyfile-password is not that of the key in {flag}") from None
        advice = "; name its file with --ssl-keyfile" if key is None else ""
        raise ConfigError(f"{flag} has no key that can be used with the certificate: {error}{advice}") from error
    except OSError as error:
        raise ConfigError(f"{flag} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--ssl-keyfile-password can't be used: {error}") from error
