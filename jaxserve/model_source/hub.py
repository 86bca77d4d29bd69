"""Finds or downloads the files of models of the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from jaxserve.errors import ModelNotFoundError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Of a repository's subfolders only further chat templates and the modules of sentence-transformers, such as 1_Pooling,
# are wanted; others repeat the model in another format
_UNWANTED_FILES = (
    *(f"{folder}/{file}" for folder in ("[!0-9]*", "?[!_]*") for file in ("*.json", "*.model", "*.safetensors")),
    "consolidated*",
)


@dataclasses.dataclass(frozen=True)
class HubVersion:
    """Which version of a model is taken, where its files are kept, and the token that gives access to them.

    `revision` is a branch, tag or commit, None for the main branch; `folder` None is the cache of huggingface_hub, and
    `token` None is $HF_TOKEN or that of `hf auth login`, if there is one.
    """

    revision: str | None = None
    folder: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)


def hub_folder(repo: str, version: HubVersion, files: Sequence[str], *, offline: bool) -> Path:
    """Return the folder with those files of a model that match `files`. Raises `ModelNotFoundError`."""
    # Imported here so that local models start without it
    from huggingface_hub import constants, errors, snapshot_download

    what, command = f"hub model {repo!r}", f"hf download {repo}"
    if version.revision is not None:
        what, command = f"{what} at revision {version.revision!r}", f"{command} --revision {version.revision}"
    advice = f"Download it where the network is (`{command}`), copy the folder here, and pass its path as --model"
    offline = offline or bool(constants.HF_HUB_OFFLINE)
    try:
        folder = snapshot_download(
            repo,
            revision=version.revision,
            cache_dir=None if version.folder is None else Path(version.folder).expanduser(),
            allow_patterns=list(files),
            ignore_patterns=list(_UNWANTED_FILES),
            local_files_only=offline,
            token=version.token,
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{what} is gated: ask for access on its page, then run `hf auth login`, or set HF_TOKEN or --hf-token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"the hub's model {repo!r} has no revision {version.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {repo!r}, or it is private and no token gives access. If a folder was meant: there "
            f"is none at {Path(repo).absolute()}"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "downloads are off" if offline else "the hub can't be reached from here"
        place = "the local cache" if version.folder is None else version.folder
        raise ModelNotFoundError(f"{what} is not in {place}, and {why}. {advice}") from error
    except Exception as error:  # its HTTP client, whose errors come through, changes with its version
        raise ModelNotFoundError(f"could not get {what}: {error}. {advice}") from error
    return Path(folder)
