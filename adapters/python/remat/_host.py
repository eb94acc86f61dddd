# SPDX-License-Identifier: Apache-2.0
"""How much memory of the host this process may take."""

from __future__ import annotations

import pathlib
from typing import Iterator

_GROUPS = pathlib.Path("/sys/fs/cgroup")


def _number(path: pathlib.Path) -> int | None:
    """What a file of a memory cgroup says; nothing for no limit, or without the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _groups() -> Iterator[tuple[int, int]]:
    """Limits of the memory cgroups that this process is in, with the bytes that are taken there and not easily given back."""
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0" and not kinds:  # version 2
            root, limit, usage, idle = _GROUPS, "memory.max", "memory.current", "inactive_file "
        elif "memory" in kinds.split(","):
            root, limit, usage, idle = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            most, taken = _number(group / limit), _number(group / usage)
            if most is not None and taken is not None:
                try:
                    statistics = (group / "memory.stat").read_text().splitlines()
                except OSError:
                    statistics = []
                yield most, taken - sum(int(s.split()[1]) for s in statistics if s.startswith(idle))
            if group == root:
                break


def _system(field: str) -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def limit() -> int:
    """Bytes that this process can take at most: what the machine has, or a memory cgroup allows."""
    return min([_system("MemTotal"), *(most for most, _ in _groups())])


def free() -> int:
    """Bytes that it can take on top of what is taken already."""
    return max(0, min([_system("MemAvailable"), *(most - taken for most, taken in _groups())]))
