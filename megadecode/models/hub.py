"""Models of the Hugging Face hub, through `huggingface_hub`: its cache, token and environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megadecode.errors import ModelError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# Weights in other formats, and second copies of the same weights, are not fetched.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form `org/name`; a GGUF file's name does not count."""
    return _ID.fullmatch(model) is not None and not model.lower().endswith(".gguf")


def fetch_snapshot(repo: str, *, progress: bool) -> Path:
    """The folder of a repository's newest snapshot; without a network, of the one in the cache.

    Raises ModelError.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelError(
            f"{repo}: there is no such path, and models of the hub need huggingface_hub; "
            "`pip install huggingface_hub` installs it"
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                tqdm_class=None if progress else _silent(),
            )
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo}: its owner asks for a consent; give it on the model's page, "
            "then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo}: there is no such path, and no such model on the hub that this login may see"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(
            f"{repo}: not in the hub's cache, {huggingface_hub.constants.HF_HUB_CACHE}, and the "
            "hub cannot be reached. Copy that cache from a machine that has it, or give the path "
            "of a folder"
        ) from None
    except Exception as error:  # of the client, its transport or the disk: versions differ
        raise ModelError(f"{repo}: cannot be fetched from the hub: {error}") from None


def _silent() -> type:
    from tqdm.auto import tqdm  # what huggingface_hub's own bars are made of

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    return Silent
