"""`jaxserve pull`: downloads models, so that a later start needs no network.

Built-in models are kept in $JAXSERVE_HOME, those of the Hugging Face hub in its cache or in --download-dir.
"""

from __future__ import annotations

from jaxserve import model_source
from jaxserve.cli.common.parser import Parser
from jaxserve.config.model_files import model_files
from jaxserve.config.schema import DEFAULT_MODEL, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import BUILTIN_MODELS


def parser() -> Parser:
    """Return the parser of `jaxserve pull`."""
    parser = Parser(prog="jaxserve pull", description=__doc__)
    parser.add_argument(
        "models",
        metavar="model",
        nargs="*",
        default=[DEFAULT_MODEL],
        help=f"a built-in name: {', '.join(BUILTIN_MODELS)} (default {DEFAULT_MODEL}); or a hub id (org/name)",
    )
    parser.add_argument("--force", action="store_true", help="download a built-in model again even if it is there")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of the hub's model")
    parser.add_argument("--hf-token", metavar="TEXT", help="token of the hub, instead of $HF_TOKEN")
    parser.add_argument("--download-dir", metavar="DIR", help="folder for the files of the hub's models")
    return parser


def main(argv: list[str]) -> int:
    """Run the command: print the path of each model and return the exit code."""
    arguments = parser().parse(argv)
    for model in arguments.models:
        config = EngineConfig(
            model=model,
            revision=arguments.revision,
            download_dir=arguments.download_dir,
            hf_token=arguments.hf_token,
        )
        print(_pull(config, force=arguments.force), flush=True)
    return 0


def _pull(config: EngineConfig, *, force: bool) -> object:
    if config.revision is None and not model_source.is_hub_id(config.model):
        return model_source.pull(config.model, force=force)
    if force:
        raise ConfigError(
            f"--force is for built-in models; `hf download {config.model} --force-download` does it for a hub's"
        )
    return model_files(config).path
