# SPDX-License-Identifier: Apache-2.0
"""The devices that steps can run on."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  loads the libraries that `_torch` needs

from . import _torch


def devices() -> list[dict[str, Any]]:
    """Lists the host and all accelerators that PyTorch knows.

    Each entry has `device` (a text for `torch.device`), `name`, `total` and `free` memory in bytes, and `problem`. `problem` is empty if steps can run on the
    device. Otherwise it is one sentence with the cause.

        >>> [d["device"] for d in remat.devices() if not d["problem"]]
        ['cpu']
    """
    return _torch.devices()
