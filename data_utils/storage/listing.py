"""URLs become stored objects: which store a scheme means, and which of its objects a URL names."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.urls import without_secrets
from data_utils.storage.buckets import SCHEMES, bucket_object, list_bucket
from data_utils.storage.hub_datasets import list_hub
from data_utils.storage.objects import StoredObject
from data_utils.storage.web import list_web

_SUPPORTED = "s3://, gs://, az:// (abfs://), hf://datasets/ and https://"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a URL names."""

    objects: list[StoredObject]
    folders: list[str]  # that a glob matches, which names no object in them


def object_named(url: str) -> StoredObject | None:
    """The object of exactly this name; None if there is none. Raises: ConfigError, DataError."""
    scheme = url.partition("://")[0].lower()
    if scheme in SCHEMES:
        return bucket_object(url)
    if scheme == "hf":
        return next(iter(list_hub(url, is_name=True)[0]), None)
    return next(iter(list_url(url).objects))


def stored_content(url: str, limit: int) -> bytes | None:
    """The content of a small object; None if there is none of this name. Raises: ConfigError, DataError."""
    stored = object_named(url)
    if stored is None:
        return None
    if stored.size > limit:
        raise DataError(f"{stored} has {stored.size:,} bytes, more than the {limit:,} that are read of it.")
    return stored.read(0, stored.size)


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
