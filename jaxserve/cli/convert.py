"""`jaxserve convert`: writes a model as a folder that loads fast onto any mesh.

The folder holds an Orbax checkpoint, the model's config and its tokenizer.

MODEL may be anything that `serve` accepts. The folder gets its name only when it is complete, and an existing folder is
never changed. `jaxserve serve --model DIR` loads it, also on another machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.config.model_files import model_files
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

_SETTINGS = (
    "model", "runner", "convert", "pooling", "hf_overrides", "load_format", "dtype", "quantization", "random_seed",
    "log_level", "revision", "download_dir",
)  # fmt: skip


def parser() -> Parser:
    """Return the parser of `jaxserve convert`."""
    parser = Parser(prog="jaxserve convert", description=__doc__)
    parser.add_argument("--output", metavar="DIR", type=Path, help="the folder to create; must not exist yet")
    flags.add_model(parser)
    flags.add_settings(parser, only=_SETTINGS)
    return parser


def main(argv: list[str]) -> int:
    """Run the command: print the folder and return the exit code."""
    arguments = parser().parse(argv)
    loaded = flags.config_from_arguments(arguments)
    flags.llm_arguments(loaded)
    output: Path | None = arguments.output
    if output is None:
        raise ConfigError("name the folder to create: --output DIR")
    with new_folder(output.expanduser()) as folder:
        _convert(loaded.engine, folder)
    print(output)
    dtype = " --dtype float32" if loaded.engine.dtype == "float32" else ""
    print(f"jaxserve serve --model {output}{dtype} starts with it", file=sys.stderr)
    return 0


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end, or removed after an error.

    Raises `ConfigError` if `path` exists already or can't be created.
    """
    if os.path.lexists(path):
        raise ConfigError(f"--output {path} exists already; choose another folder, or remove it")
    partial = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output {path} can't be created: {error}") from error
    try:
        yield partial
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"--output {path} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(config: EngineConfig, folder: Path) -> None:
    from jaxserve.text.tokenizers.save import save_tokenizer
    from jaxserve.weights.convert import convert

    source = model_files(config)
    save_tokenizer(source, folder)
    with tqdm(desc="Writing weights", unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True) as bar:

        def progress(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        convert(source, config, folder, progress)
