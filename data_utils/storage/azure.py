"""Azure's storage accounts: which one a URL means, where its storage is, and the key or signature for it.

All but the URL comes from the environment: AZURE_STORAGE_CONNECTION_STRING as Azure's portal and SDKs write it, or the
variables of the single values.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.urls import split_url

CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
# Of Azure's clouds. Another host gets a key or signature only where the environment names it, not a URL in a recipe.
_CLOUDS = ("core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net")


@dataclass(frozen=True, slots=True)
class Account:
    """A storage account."""

    name: str
    cloud: str = _CLOUDS[0]  # the end of the names of its hosts


def account_in_url(url: str, host: str) -> Account:
    """The account of a URL. Args: host: what follows @ in it; "" = the environment's. Raises ConfigError."""
    name, _, rest = host.partition(".")
    cloud = rest.removeprefix("dfs.").removeprefix("blob.") or _CLOUDS[0]
    if host and (not name or cloud not in _CLOUDS or rest == cloud):
        raise ConfigError(
            f"{url} names no host of Azure's; write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME, or for another "
            f"store az://CONTAINER/NAME and set {CONNECTION_STRING}."
        )
    if host:
        return Account(name, cloud)
    connection, environ = _connection(), os.environ
    name = (
        connection.get("accountname")
        or environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        or environ.get("AZURE_STORAGE_ACCOUNT")
        or ""
    )
    if not name:
        raise ConfigError(
            f"{url} names no storage account; set AZURE_STORAGE_ACCOUNT_NAME or {CONNECTION_STRING}, or write "
            "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME"
        )
    return Account(name, connection.get("endpointsuffix") or _CLOUDS[0])


def file_system_options(account: Account) -> dict[str, Any]:
    """The arguments of pyarrow's AzureFileSystem for an account. Raises ConfigError."""
    connection, environ = _connection(), os.environ
    if connection.get("accountname") != account.name:
        connection = {}
    key, key_name = connection.get("accountkey"), f"AccountKey of {CONNECTION_STRING}"
    token = connection.get("sharedaccesssignature")
    if not (key or token):
        key, key_name = environ.get("AZURE_STORAGE_ACCOUNT_KEY"), "AZURE_STORAGE_ACCOUNT_KEY"
        key = key or environ.get("AZURE_STORAGE_KEY")
        token = environ.get("AZURE_STORAGE_SAS_TOKEN")
    _check_key(key, key_name)
    scheme = connection.get("defaultendpointsprotocol") or "https"
    blob, dfs = f".blob.{account.cloud}", f".dfs.{account.cloud}"
    if endpoint := connection.get("blobendpoint"):
        scheme, blob, dfs = _authorities(endpoint, account.name)
    return {
        "account_name": account.name,
        "account_key": key or None,
        # pyarrow takes one of them, and puts a signature without its question mark into the path.
        "sas_token": f"?{token.removeprefix('?')}" if token and not key else None,
        "blob_storage_authority": blob,
        "dfs_storage_authority": dfs,
        "blob_storage_scheme": scheme,
        "dfs_storage_scheme": scheme,
    }


def _connection() -> Mapping[str, str]:
    """The values of the connection string by their names in lower case; none if it is not set. Raises ConfigError."""
    text = os.environ.get(CONNECTION_STRING)
    if not text:
        return {}
    parts = (part.strip().partition("=") for part in text.split(";") if part.strip())
    values = {name.lower(): value for name, _, value in parts}
    # One with a shared access signature, as Azure's portal writes it, names the account only in the host.
    name, _, rest = split_url(values.get("blobendpoint", "")).netloc.partition(".")
    if not values.get("accountname") and rest.startswith("blob."):
        values["accountname"] = name
    if not values.get("accountname"):
        raise ConfigError(
            f"{CONNECTION_STRING} has no AccountName; copy it from the storage account's page (Access keys), or add "
            "AccountName=ACCOUNT;"
        )
    return values


def _authorities(endpoint: str, account: str) -> tuple[str, str, str]:
    """Scheme and hosts of blobs and of data lakes, as pyarrow takes them: one that begins with . follows a name."""
    parts = split_url(endpoint)
    if parts.scheme in ("http", "https") and parts.netloc:
        if parts.netloc.startswith(f"{account}.") and parts.path in ("", "/"):
            blob = parts.netloc[len(account) :]
            return parts.scheme, blob, blob.replace(".blob.", ".dfs.", 1)
        if parts.path.rstrip("/") == f"/{account}":
            return parts.scheme, parts.netloc, parts.netloc
    raise ConfigError(
        f"BlobEndpoint of {CONNECTION_STRING} is neither https://{account}.HOST nor https://HOST/{account}; give "
        "the one that the store documents."
    )


def _check_key(key: str | None, name: str) -> None:
    """Raise ConfigError for a key that cannot be one: pyarrow says of it what it says of a store that is down."""
    try:
        base64.b64decode(key or "", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{name} is no key of Azure's, which are base64; copy it again.") from None
