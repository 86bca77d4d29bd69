"""Reads a sweep's YAML file and checks the combinations of engine settings and loads before anything runs.

    base:                      # flags of `jaxserve serve` for every server
      model: smollm2-135m-instruct
    engine:                    # every combination is one server
      max_running_requests: [8, 16]
    load:                      # every combination is one `jaxserve bench serve` against each server
      dataset_name: random
      max_concurrency: [1, 4]
    repetitions: 3

`engine` and `load` may also be lists of such mappings: their combinations are then run one list entry after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.nearest import nearest
from jaxserve.config.settings import as_flag, as_key, settings
from jaxserve.errors import ConfigError

type Options = Mapping[str, Any]

_TIMES = {"start_timeout": 1800.0, "run_timeout": 3600.0}
_KEYS = ("base", "engine", "load", "repetitions", *_TIMES)
# The sweep sets these itself: each server has its own port, and every run its own result file.
_RESERVED = {
    "engine": ("host", "port", "api_key", "served_model_name"),
    "load": (
        "base_url", "host", "port", "model", "output_json", "output_file", "result_filename", "save_result",
        "result_dir", "save_detailed", "api_key",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GridRun:
    """One measurement: engine setting number `engine` under load number `load`; `repetition` counts from 1."""

    engine: int
    load: int
    repetition: int

    @property
    def name(self) -> str:
        """The name of the run's files."""
        return f"engine-{self.engine + 1:02d}.load-{self.load + 1:02d}.rep-{self.repetition}"


@dataclasses.dataclass(frozen=True)
class Grid:
    """The runs of a sweep. `engines` are the settings of each server on top of `base`; timeouts are in seconds."""

    base: Options
    engines: tuple[Options, ...]
    loads: tuple[Options, ...]
    repetitions: int
    start_timeout: float
    run_timeout: float

    def runs_of(self, engine: int) -> list[GridRun]:
        """Return the runs of one setting: all loads once, then all again, so that other activity affects all alike."""
        turns = range(1, self.repetitions + 1)
        return [GridRun(engine, load, turn) for turn in turns for load in range(len(self.loads))]

    def runs(self) -> list[GridRun]:
        """Return all runs in order."""
        return [run for engine in range(len(self.engines)) for run in self.runs_of(engine)]

    def serve_flags(self, engine: int) -> list[str]:
        """Return the command line of a setting's server."""
        return as_flags(dict(self.base) | dict(self.engines[engine]))

    def load_flags(self, run: GridRun) -> list[str]:
        """Return the load's command line. Every repetition has its own seed, the same for every setting: with equal
        prompts the second repetition would hit the prefix cache of the first."""
        load = dict(self.loads[run.load])
        load["seed"] = int(load.get("seed", 0)) + run.repetition - 1
        return as_flags(load)

    def varying_load(self, load: int) -> Options:
        """Return the options that distinguish a load from the others."""
        return {key: self.loads[load].get(key) for key in varying_keys(self.loads)}

    def as_json(self) -> dict[str, Any]:
        """Return the grid as JSON, for comparison with a later one."""
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
        repetitions=_positive_int(path, "repetitions", content.get("repetitions", 1)),
        start_timeout=_seconds(path, "start_timeout", content),
        run_timeout=_seconds(path, "run_timeout", content),
    )
    for engine in grid.engines:
        check_engine(base | dict(engine), f"{path}: engine")
    for i in range(len(grid.loads)):
        try:
            check_load(grid.load_flags(GridRun(0, i, 1)))
        except ConfigError as error:
            raise ConfigError(f"{path}: load: {error}") from None
    return grid


def check_engine(options: Options, place: str) -> None:
    """Raise `ConfigError` where `jaxserve serve` would."""
    load_config(GivenSetting(as_key(key), value, "yaml", f"{place}.{key}") for key, value in options.items())


def as_flags(options: Options) -> list[str]:
    """Return options as a command line: true is `--key`, false is `--no-key` for settings and nothing for loads, null
    is nothing, and a list is its values."""
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


def varying_keys(options: Sequence[Options]) -> list[str]:
    """Return the keys whose values differ between these options."""
    keys = dict.fromkeys(key for one in options for key in one)
    return [key for key in keys if len({format_value(one.get(key)) for one in options}) > 1]


def format_value(value: object) -> str:
    """Return an option's value as one word."""
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
        if key in _RESERVED.get("engine" if name == "base" else name, ()):
            raise ConfigError(f"{path}: {name}.{key} is set by the sweep itself; leave it out")
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


def _positive_int(path: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _seconds(path: Path, key: str, content: Mapping[str, Any]) -> float:
    value = content.get(key, _TIMES[key])
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{path}: {key} must be seconds above 0, got {value!r}")
    return float(value)
