"""The package index as a user without settings of pip sees it."""

from __future__ import annotations

import os

KEPT = ("PIP_CERT", "PIP_PROXY", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")  # the way to the index
SKIPPED = (
    "comparing the requirements with the package index takes half a minute and needs it; CI=true asks for it"
)
NO_ANSWER = "the package index does not answer, so the requirements were NOT compared with it"


def is_asked() -> bool:
    return os.environ.get("CI") == "true"


def environment() -> dict[str, str]:
    """Without configuration files, further indexes and local wheels, any of which may hide what others get."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in KEPT}
    return {
        **kept,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONNOUSERSITE": "1",
    }


def answers(errors: str) -> bool:
    """Whether the index answered, by what pip said of a package that surely exists."""
    signs = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError",
             "Connection to ", "connection broken by")  # fmt: skip
    return not any(sign in errors for sign in signs)
