"""A sweep's YAML file: which settings and loads are combined, checked before anything runs. It starts nothing.

    base:                      # flags of `jaxserve serve` that all have
      model: smollm2-135m-instruct
    engine:                    # every combination is one server
      max_running_requests: [8, 16]
    load:                      # every combination is one `jaxserve bench serve` against each
      dataset_name: random
      max_concurrency: [1, 4]
    repetitions: 3

`engine` and `load` may also be lists of such mappings: then the grids are tried one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.config.load import Given, resolve
from jaxserve.config.nearest import nearest
from jaxserve.config.settings import as_flag, as_key, settings
from jaxserve.errors import ConfigError

type Options = Mapping[str, Any]

_TIMES = {"start_timeout": 1800.0, "run_timeout": 3600.0}
_KEYS = ("base", "engine", "load", "repetitions", *_TIMES)
# Ours to give: each server has its own port, and every run its own file and seed.
_OURS = {
    "engine": ("host", "port", "api_key", "served_model_name"),
    "load": (
        *("base_url", "host", "port", "model", "output_json", "output_file", "result_filename", "save_result"),
        *("result_dir", "save_detailed", "api_key"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement: setting number `engine` under load number `load`, for the `repetition`-th time, from 1."""

    engine: int
    load: int
    repetition: int

    @property
    def name(self) -> str:
        """Names its files."""
        return f"engine-{self.engine + 1:02d}.load-{self.load + 1:02d}.rep-{self.repetition}"


@dataclasses.dataclass(frozen=True)
class Grid:
    """What to run. `engines` are the settings that differ, without `base`; timeouts are in seconds."""

    base: Options
    engines: tuple[Options, ...]
    loads: tuple[Options, ...]
    repetitions: int
    start_timeout: float
    run_timeout: float

    def runs_of(self, engine: int) -> list[Run]:
        """All loads once, then all again: what the machine does meanwhile falls on all of them alike."""
        turns = range(1, self.repetitions + 1)
        return [Run(engine, load, turn) for turn in turns for load in range(len(self.loads))]

    def runs(self) -> list[Run]:
        """All runs in their order."""
        return [run for engine in range(len(self.engines)) for run in self.runs_of(engine)]

    def serve_flags(self, engine: int) -> list[str]:
        """The command line of a setting's server."""
        return as_flags(dict(self.base) | dict(self.engines[engine]))

    def load_flags(self, run: Run) -> list[str]:
        """The load's command line. Every repetition has prompts of its own, the same for every setting: otherwise the
        second one would find the first one's in the prefix cache."""
        load = dict(self.loads[run.load])
        load["seed"] = int(load.get("seed", 0)) + run.repetition - 1
        return as_flags(load)

    def varying_load(self, load: int) -> Options:
        """What tells a load from the others."""
        return {key: self.loads[load].get(key) for key in varying(self.loads)}

    def as_json(self) -> dict[str, Any]:
        """What it was made of, for the comparison with a later one."""
        return dataclasses.asdict(self)


def read_grid(path: Path, check_load: Callable[[list[str]], object]) -> Grid:
    """Read and check a file; `check_load` parses a command line of `bench serve`. Raises `ConfigError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping with the keys {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            hint = nearest(str(key), _KEYS) or f"; the keys are {', '.join(_KEYS)}"
            raise ConfigError(f"{path}: {key} is not a key of a sweep{hint}")
    if not content.get("load"):
        raise ConfigError(f"{path}: there is no load: options of `jaxserve bench serve` under the key 'load'")
    base = dict(_options(path, "base", content.get("base") or {}))
    grid = Grid(
        base=base,
        engines=tuple(_combinations(path, "engine", content.get("engine") or {})),
        loads=tuple(_combinations(path, "load", content["load"])),
        repetitions=_whole(path, "repetitions", content.get("repetitions", 1)),
        start_timeout=_seconds(path, "start_timeout", content),
        run_timeout=_seconds(path, "run_timeout", content),
    )
    for engine in grid.engines:
        check_engine(base | dict(engine), f"{path}: engine")
    for i in range(len(grid.loads)):
        try:
            check_load(grid.load_flags(Run(0, i, 1)))
        except ConfigError as error:
            raise ConfigError(f"{path}: load: {error}") from None
    return grid


def check_engine(options: Options, place: str) -> None:
    """Raises `ConfigError` where `jaxserve serve` would."""
    resolve(Given(as_key(key), value, "yaml", f"{place}.{key}") for key, value in options.items())


def as_flags(options: Options) -> list[str]:
    """Options as a command line: true is `--key`, false nothing for loads and `--no-key` for settings, a list its
    values, null nothing."""
    flags = []
    for key, value in options.items():
        flag = as_flag(as_key(key))
        if value is None or (value is False and as_key(key) not in settings()):
            continue
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            flags += [flag, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return flags


def varying(options: Sequence[Options]) -> list[str]:
    """The keys that tell these apart."""
    keys = dict.fromkeys(key for one in options for key in one)
    return [key for key in keys if len({shown(one.get(key)) for one in options}) > 1]


def shown(value: object) -> str:
    """A value of an option in one word."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _combinations(path: Path, name: str, content: object) -> Iterator[Options]:
    for mapping in content if isinstance(content, list) else [content]:
        options = _options(path, name, mapping)
        alternatives = [_alternatives(path, name, key, value) for key, value in options.items()]
        for values in itertools.product(*alternatives):
            yield dict(zip(options, values))


def _options(path: Path, name: str, content: object) -> Options:
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: {name} must be a mapping of options, got {content!r}")
    options = {as_key(str(key)): value for key, value in content.items()}
    for key in options:
        if key in _OURS.get("engine" if name == "base" else name, ()):
            raise ConfigError(f"{path}: {name}.{key} is given by the sweep itself; leave it out")
    return options


def _alternatives(path: Path, name: str, key: str, value: object) -> Sequence[object]:
    if not isinstance(value, list):
        return [value]
    if not value:
        raise ConfigError(f"{path}: {name}.{key} is an empty list; give the values to try")
    setting = settings().get(key) if name == "engine" else None
    if setting is not None and setting.is_list and not all(isinstance(one, list | None) for one in value):
        raise ConfigError(f"{path}: {name}.{key} takes lists, so the values to try are lists of lists, as [[1, 8]]")
    return value


def _whole(path: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {key} must be a whole number from 1 on, got {value!r}")
    return value


def _seconds(path: Path, key: str, content: Mapping[str, Any]) -> float:
    value = content.get(key, _TIMES[key])
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{path}: {key} must be seconds above 0, got {value!r}")
    return float(value)
