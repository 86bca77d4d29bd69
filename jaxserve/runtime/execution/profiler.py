"""Records profiles with `jax.profiler`, with the engine's own spans on the timeline and the scopes of each program.

A profile opens in XProf and Perfetto. Besides the files of jax it has `scopes.json.gz`, which says to which layer and
phase each instruction of each program belongs, as the traces of some devices lack that.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.observability.timeline import Timeline

SCOPES = "scopes.json.gz"

_MODULE = re.compile(r"HloModule (?P<name>[\w.-]+)")
_INSTRUCTION = re.compile(r'^ +(?:ROOT )?%?(?P<name>[\w.-]+) = .*\bop_name="(?P<path>[^"]+)"', flags=re.M)
# Parts of an instruction's path that come from jax, not from our named scopes.
_NOT_A_SCOPE = re.compile(r".*[(),].*|while|body|cond|shard_map|closed_call|eval_jaxpr|branch_\d+_fun|scan|checkpoint")


class JaxProfiler:
    """Records the devices and, through `timeline`, the engine's thread, while the engine runs `programs`."""

    def __init__(self, timeline: Timeline, programs: Sequence[Mapping[Any, Callable[..., Any]]]) -> None:
        self._timeline = timeline
        self._programs = programs
        self._folder = Path()

    def start(self, directory: Path, name: str, *, with_stack: bool) -> Path:
        """Start to record, and return the folder that the files will be in."""
        options = jax.profiler.ProfileOptions()
        options.session_id = name
        options.python_tracer_level = int(with_stack)
        jax.profiler.start_trace(directory, profiler_options=options)
        self._timeline.watch(jax.profiler.TraceAnnotation)
        self._folder = directory / "plugins" / "profile" / name
        return self._folder

    def stop(self) -> None:
        """Stop recording and write the files. Other threads keep running."""
        self._timeline.unwatch()
        jax.profiler.stop_trace()
        programs = (program for programs in self._programs for program in programs.values())
        scopes = dict(map(scopes_of, (program.as_text() for program in programs)))  # type: ignore[attr-defined]
        (self._folder / SCOPES).write_bytes(gzip.compress(json.dumps(scopes).encode(), 1))


def scopes_of(text: str) -> tuple[str, dict[str, str]]:
    """Return a program's name and the scope of each instruction that has one (`layer_3/mlp`), from its text."""
    module = _MODULE.match(text)
    assert module is not None, text[:80]
    found = {match["name"]: _scope(match["path"]) for match in _INSTRUCTION.finditer(text)}
    return module["name"], {name: scope for name, scope in found.items() if scope}


def _scope(path: str) -> str:
    """Return the scopes of an instruction, outermost first; repeats of a scope within itself count once."""
    parts = [part for part in path.split("/")[:-1] if not _NOT_A_SCOPE.fullmatch(part)]
    return "/".join(part for part, before in zip(parts, [None, *parts]) if part != before)
