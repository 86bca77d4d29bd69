"""`jaxserve convert`: writes a model as a folder that loads fast, onto any mesh.

It holds an Orbax checkpoint, the model's config and its tokenizer.

MODEL may be whatever `serve` takes. The folder is written whole or not at all, under another name until it is done, and
an existing one is never touched. `jaxserve serve --model DIR` takes it, also on another machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from jaxserve import model_source
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

_SETTINGS = ("model", "load_format", "dtype", "random_seed", "log_level")


def parser() -> Parser:
    """The flags of `jaxserve convert`."""
    parser = Parser(prog="jaxserve convert", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", metavar="DIR", type=Path, help="the folder to make; must not exist yet")
    flags.add_model(parser)
    flags.add_settings(parser, only=_SETTINGS)
    return parser


def main(argv: list[str]) -> int:
    """Run it; prints the folder and returns the exit code."""
    arguments = parser().parse(argv)
    loaded = flags.loaded(arguments)
    flags.arguments(loaded)
    output: Path | None = arguments.output
    if output is None:
        raise ConfigError("say where to: --output DIR")
    with new_folder(output.expanduser()) as folder:
        _convert(loaded.engine, folder)
    print(output)
    dtype = " --dtype float32" if loaded.engine.dtype == "float32" else ""
    print(f"jaxserve serve --model {output}{dtype} starts with it", file=sys.stderr)
    return 0


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which stands at `path` once it is left without an error, and else is removed.

    Raises `ConfigError` where something is at `path` already, or nothing can be made there.
    """
    if os.path.lexists(path):
        raise ConfigError(f"--output {path} exists already; choose another folder, or remove it")
    partial = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output {path} can't be made: {error}") from error
    try:
        yield partial
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"--output {path} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(config: EngineConfig, folder: Path) -> None:
    from jaxserve.runtime.convert import convert
    from jaxserve.text.save import save_tokenizer

    source = model_source.resolve(config.model)
    save_tokenizer(source, folder)
    with tqdm(desc="Writing weights", unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True) as bar:

        def progress(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        convert(source, config, folder, progress)
