"""`jaxserve doctor`: watches a running server for a while and gives the advice of the tuning guides.

It reads /metrics, /health and, for the settings, /server_info (with --api-key if the server has one). It changes
nothing.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common.parser import Parser
from jaxserve.errors import ConfigError, JaxserveError

if TYPE_CHECKING:
    import httpx

    from jaxserve.observability.sample import Sample, Settings

_TIMEOUT = 10.0
_INDENT = "  "


def parser() -> Parser:
    """Return the parser of `jaxserve doctor`."""
    parser = Parser(prog="jaxserve doctor", description=__doc__)
    parser.add_argument("url", metavar="URL", help="where the server listens, such as http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="X", help="how long to watch (default 30)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between samples (default 1)")
    parser.add_argument("--api-key", metavar="TEXT", help="the server's --api-key, needed to read its settings")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; return 0 if the server served the whole time, 1 if it stopped."""
    arguments = parser().parse(argv)
    if arguments.interval <= 0 or arguments.seconds < arguments.interval:
        raise ConfigError(
            f"--seconds is {arguments.seconds:g} and --interval {arguments.interval:g}: the interval must be above 0 "
            "and at most --seconds"
        )
    import httpx

    headers = {} if arguments.api_key is None else {"authorization": f"Bearer {arguments.api_key}"}
    with httpx.Client(base_url=_base_url(arguments.url), headers=headers, timeout=_TIMEOUT) as client:
        print(f"watching {client.base_url} for {arguments.seconds:g} s", file=sys.stderr)
        samples, settings, notes = watch(client, arguments.seconds, arguments.interval)
    print(report(samples, settings, notes))
    return 0 if samples[-1].problem is None else 1


def watch(
    client: httpx.Client,
    seconds: float,
    interval: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Sample], Settings, list[str]]:
    """Sample the server until the time is over, it stops, or Ctrl-C. Raises `JaxserveError` if it never answers."""
    from jaxserve.observability.sample import read_sample, read_settings

    metrics, problem = _read_metrics(client)
    if metrics is None:
        raise JaxserveError(f"{client.base_url} does not serve: {problem}")
    info, note = _server_info(client)
    settings, notes = read_settings(metrics, info), [] if note is None else [note]
    start = clock()
    samples = [read_sample(metrics, 0.0, problem)]
    try:
        while problem is None and (passed := clock() - start) < seconds:
            sleep(min(interval, seconds - passed))
            newer, problem = _read_metrics(client)
            metrics = newer or metrics
            samples.append(read_sample(metrics, clock() - start, problem))
    except KeyboardInterrupt:
        notes.append("Stopped before the time was over.")
    return samples, settings, notes


def report(samples: Sequence[Sample], settings: Settings, notes: Sequence[str]) -> str:
    """Return the summary and the advice as text."""
    from jaxserve.observability.tuning_rules import MIN_BUSY, apply_rules, busy_samples

    lines = [*notes, _summary(samples), ""]
    found = apply_rules(samples, settings)
    for advice in found:
        lines += [f"{advice.rule.upper()}: {advice.figure}", f"{_INDENT}{advice.what_to_do}", ""]
    working = len(busy_samples(samples))
    if working < MIN_BUSY:
        lines.append(
            f"There was work in {working} of {len(samples)} samples: too little for advice; repeat under load."
        )
    elif not found:
        lines.append(f"HEALTHY: {working} of {len(samples)} samples had work, and no rule of the guides applies.")
    return "\n".join(textwrap.fill(line, 110, subsequent_indent=_INDENT) for line in lines).rstrip()


def _summary(samples: Sequence[Sample]) -> str:
    def spread(values: Sequence[float], form: str) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"{low:{form}} / {middle:{form}} / {high:{form}}"

    seconds = samples[-1].seconds - samples[0].seconds
    tokens = samples[-1].generation_tokens - samples[0].generation_tokens
    return (
        f"{len(samples)} samples in {seconds:.0f} s; least / median / most: "
        f"#running-req {spread([s.running for s in samples], '.0f')} (of {samples[-1].max_running}), "
        f"#queue-req {spread([s.waiting for s in samples], '.0f')}, "
        f"token usage {spread([s.token_usage for s in samples], '.2f')}; "
        f"gen throughput (token/s): {tokens / seconds if seconds else 0.0:.2f}; "
        f"{samples[-1].retractions - samples[0].retractions} retractions"
    )


def _read_metrics(client: httpx.Client) -> tuple[str | None, str | None]:
    """Return the text of /metrics, or None if unknown, and the reason why the server does not serve, or None."""
    import httpx

    try:
        health = client.get("/health")
        if health.status_code == 503 and health.json().get("status") == "starting":
            return None, "it is still starting"
        metrics = client.get("/metrics").raise_for_status().text
        return metrics, health.json().get("reason")
    except (httpx.HTTPError, ValueError) as error:
        return None, f"no answer: {error or type(error).__name__}"


def _server_info(client: httpx.Client) -> tuple[dict[str, Any] | None, str | None]:
    """Return the settings, or a note that says why they are unknown."""
    import httpx

    try:
        answer = client.get("/server_info")
        if answer.status_code == 401:
            return (
                None,
                "The server's settings are unknown: /server_info needs its key; give it with --api-key.",
            )
        info: dict[str, Any] = answer.raise_for_status().json()
        return info, None
    except (httpx.HTTPError, ValueError) as error:
        return None, f"The server's settings are unknown: /server_info: {error or type(error).__name__}"


def _base_url(url: str) -> str:
    """Return the server's base address from a URL that may name a route."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
