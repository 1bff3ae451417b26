"""URLs become stored objects: which store a scheme means, and which of its objects a URL names."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.urls import without_secrets
from data_utils.storage.buckets import SCHEMES, list_bucket
from data_utils.storage.hub_datasets import list_hub
from data_utils.storage.objects import StoredObject
from data_utils.storage.web import list_web

_SUPPORTED = "s3://, gs://, az:// (abfs://), hf://datasets/ and https://"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a URL names."""

    objects: list[StoredObject]
    folders: list[str]  # that a glob matches, which names no object in them


def list_url(url: str) -> Listing:
    """The objects of a URL: one of this name, those in a folder of this name, or those that match a glob.

    Raises: DataError if there is none, or the store refuses; ConfigError for a URL of another form.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in ("http", "https"):
        return Listing(list_web(url), [])
    if scheme in SCHEMES:
        listing = Listing(*list_bucket(url))
    elif scheme == "hf":
        listing = Listing(*list_hub(url))
    else:
        raise ConfigError(
            f"{without_secrets(url)} has a scheme that is not read; supported are {_SUPPORTED}."
        )
    if not listing.objects and not listing.folders:
        raise DataError(
            f"input {without_secrets(url)} names no object, no folder with objects, and no glob that matches one; "
            "check the name (those that begin with it: NAME*)."
        )
    return listing
