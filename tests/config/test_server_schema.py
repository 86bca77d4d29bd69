from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uds": ""}, "uds must be a path"),
        ({"root_path": "llm"}, "root_path must be a path such as /llm, not ending with /, got 'llm'"),
        ({"root_path": "/llm/"}, "root_path must be a path"),
        ({"root_path": "/"}, "root_path must be a path"),
        ({"admin_api_key": ""}, "admin_api_key must not be empty"),
        ({"access_log_exclude": ("/a", "metrics")}, "access_log_exclude must .* got 'metrics'"),
        ({"ssl_keyfile": "k"}, "set ssl_certfile too: .* for ssl_keyfile$"),
        ({"ssl_keyfile_password": "p", "ssl_ciphers": "c"}, "for ssl_keyfile_password, ssl_ciphers$"),
        ({"ssl_ca_certs": "c", "ssl_cert_reqs": 2}, "for ssl_ca_certs, ssl_cert_reqs$"),
        ({"enable_ssl_refresh": True}, "for enable_ssl_refresh$"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 1}, "ssl_cert_reqs=1 needs ssl_ca_certs"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)
