# SPDX-License-Identifier: Apache-2.0
"""The device of the tests: the host, an emulated device, or a real device.

`REMAT_TEST_DEVICE` names the device: "cpu" (the default), "emulated", "cuda" or "cuda:0".
`REMAT_EMULATED` is the folder with the libraries of the emulated devices.

    emulated   an accelerator of our own, in `libemulated_accelerator.so`
    cuda       CUDA without a GPU if `libemulated_cuda.so` is preloaded; else the real device
    cuda:0     the real device
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import types
from typing import Any

import torch

name = os.environ.get("REMAT_TEST_DEVICE", "cpu")
_folder = pathlib.Path(os.environ.get("REMAT_EMULATED", "."))


def _load(file: str) -> ctypes.CDLL:
    """Loads a library and declares the types of its functions for ctypes."""
    library = ctypes.CDLL(str((_folder / file).resolve()), mode=ctypes.RTLD_GLOBAL)
    declare(library)
    return library


def declare(library: ctypes.CDLL) -> None:
    library.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
    library.emulated_get.argtypes = [ctypes.c_char_p]
    library.emulated_race.argtypes = [ctypes.c_int]
    library.emulated_race.restype = ctypes.c_char_p
    library.emulated_take.argtypes = [ctypes.c_int, ctypes.c_long]
    for counter in ("get", "races", "jobs", "copies"):
        getattr(library, "emulated_" + counter).restype = ctypes.c_long


def _device_module(library: ctypes.CDLL) -> types.ModuleType:
    """The module `torch.emulated`, which corresponds to `torch.cuda`."""
    library.emulated_seed.argtypes = [ctypes.c_ulong]
    of_any = torch.accelerator

    def generator(device="emulated"):
        index = torch.device(device).index
        return torch._C._accelerator_getDefaultGenerator(of_any.current_device_index() if index is None else index)

    class on_device:
        """A context that changes the current device."""

        def __init__(self, device):
            index = device if isinstance(device, int) else torch.device(device).index
            self._index = -1 if index is None else index

        def __enter__(self):
            self._before = of_any.current_device_index()
            if self._index >= 0:
                of_any.set_device_index(self._index)

        def __exit__(self, *_):
            of_any.set_device_index(self._before)

    module = types.ModuleType("torch.emulated")
    module.is_available = lambda: True
    module._initialized = True  # read by torch.utils.checkpoint
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device = on_device
    module.device_count = lambda: 2
    module.current_device = of_any.current_device_index
    module.set_device = of_any.set_device_index
    module.current_stream = of_any.current_stream
    module.synchronize = of_any.synchronize
    module.Stream = lambda device="emulated", priority=0: torch.Stream(device=device, priority=priority)
    module.Event = lambda enable_timing=False: torch.Event("emulated", enable_timing=enable_timing)
    module.manual_seed_all = lambda seed: library.emulated_seed(int(seed) & (2**64 - 1))
    module.manual_seed = lambda seed: generator().manual_seed(int(seed))
    module.initial_seed = lambda: generator().initial_seed()
    module.get_rng_state = lambda device="emulated": generator(device).get_state()
    module.set_rng_state = lambda state, device="emulated": generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda including_emulation=True: True
    for function in ("empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved",
                     "max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        setattr(module, function, getattr(of_any, function))
    module.mem_get_info = of_any.get_memory_info
    return module


def _start_accelerator() -> tuple[torch.device, ctypes.CDLL]:
    library = _load("libemulated_accelerator.so")
    torch.utils.rename_privateuse1_backend("emulated")  # the library has renamed the backend in C++; this renames it in Python
    torch._register_device_module("emulated", _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device("emulated", 0), library


def _start_cuda() -> tuple[torch.device, ctypes.CDLL | None]:
    if "libemulated_cuda.so" not in os.environ.get("LD_PRELOAD", ""):
        return torch.device("cuda", 0), None
    hardware = ctypes.CDLL(None)  # the preloaded library
    declare(hardware)
    ctypes.CDLL(str((_folder / "libemulated_cuda_kernels.so").resolve()), mode=ctypes.RTLD_GLOBAL)
    torch.backends.cudnn.enabled = False  # cuDNN and the fused attention launch kernels that are not emulated
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", 0), hardware


_hardware: ctypes.CDLL | None = None
if name == "cpu":
    device = torch.device("cpu")
elif name == "emulated":
    device, _hardware = _start_accelerator()
elif name == "cuda":
    device, _hardware = _start_cuda()
else:
    device = torch.device(name)

is_emulated = _hardware is not None
on_host = device.type == "cpu"


def use_by_default() -> None:
    """Makes the device the default for new tensors."""
    if not on_host:
        torch.set_default_device(device)


def allocated(size: int) -> int:
    """Bytes that the allocator of the device uses for a tensor of `size` bytes."""
    return size if on_host else -(-size // 512) * 512


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def seed(value: int) -> None:
    """Seeds the default generators of host and device.

    `torch.manual_seed` would also keep a stack trace for each kind of device that is missing.
    """
    torch.default_generator.manual_seed(value)
    if not on_host:
        torch.get_device_module(device).manual_seed_all(value)


def random_state() -> torch.Tensor:
    """The concatenated states of the default generators of host and device."""
    states = [torch.get_rng_state()] + ([] if on_host else [torch.get_device_module(device).get_rng_state()])
    return torch.cat(states)


def races() -> int:
    """Number of races: pairs of jobs that use the same bytes, not ordered by a stream, event or wait."""
    return _hardware.emulated_races() if _hardware else 0


def race_reports() -> list[str]:
    """Descriptions of the first races."""
    reports: list[str] = []
    while _hardware and (text := _hardware.emulated_race(len(reports))) is not None:
        reports.append(text.decode())
    return reports


def jobs() -> int:
    return _hardware.emulated_jobs() if _hardware else 0


def copies() -> int:
    """Number of copies between the host and a device."""
    return _hardware.emulated_copies() if _hardware else 0


def set_option(option: str, value: int) -> None:
    """Sets an option of the emulated hardware; `hardware.hpp` lists the options. Does nothing on real hardware."""
    if _hardware:
        _hardware.emulated_set(option.encode(), value)


def get_option(option: str) -> int:
    return _hardware.emulated_get(option.encode()) if _hardware else 0


def take(index: int, size: int) -> None:
    """Pretends that another process uses `size` bytes of a device from now on."""
    if _hardware:
        _hardware.emulated_take(index, size)


def reset() -> None:
    """Resets all counters, and makes failed streams work again."""
    if _hardware:
        _hardware.emulated_reset()


def run_checks(names: dict[str, Any], what: str) -> None:
    """Runs all functions of a script whose names begin with check_. Resets the hardware after each of them. Fails if there is a race."""
    checks = [check for name, check in names.items() if name.startswith("check_")]
    for check in checks:
        check()
        assert races() == 0, (check.__name__, race_reports())
        reset()
    print(f"{len(checks)} {what} on {device}")
