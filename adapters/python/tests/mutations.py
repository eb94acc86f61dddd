# SPDX-License-Identifier: Apache-2.0
"""Breaks the emulated devices on purpose. The checks of whole trainings must notice each mutation."""

import sys

import devices
import emulated
import host_weights
import torch
from devices import DEVICE, Gpt

import remat

# (option of the emulated device, its value, symptom that a check must notice).
MUTANTS = (
    ("drop_waits", 1, "races"),  # streams ignore waits for events
    ("wrong_stream", 1, "races"),  # events are recorded on another stream
    ("alignment", 4096, "numbers"),  # kernels require a larger alignment than arenas guarantee
)

TRAININGS = {
    "activations that move": (devices.train, {"budget": "60% of activations", "offload": "activations"}),
    "activations that move in graphs": (devices.train, {"budget": "60% of activations", "offload": "activations", "graph": True}),
    "weights of the host": (host_weights.train, {"budget": "100% of activations"}),
}


def noticed(train, options, plain):
    """Symptoms of a training: a set of "races", "numbers" and names of exceptions."""
    found = set()
    try:
        left = train(Gpt, ids, options, steps=3)
        torch.accelerator.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(plain, left, strict=True)):
            found.add("numbers")
    except remat.Error as e:
        found.add(type(e).__name__)
    if emulated.races() > 0:
        found.add("races")
    emulated.reset()
    return found


def ids():
    return torch.randint(0, 50, (8, 16))


def main():
    assert emulated.is_emulated, "a real device cannot be made wrong"
    torch.backends.mha.set_fastpath_enabled(False)  # PyTorch's choice of the fast path depends on the place of the weights
    caught = 0
    for name, (train, options) in TRAININGS.items():
        plain = train(Gpt, ids, None, steps=3)
        assert noticed(train, options, plain) == set(), name
        for option, value, symptom in MUTANTS:
            right = emulated.get_option(option)
            emulated.set_option(option, value)
            found = noticed(train, options, plain)
            emulated.set_option(option, right)
            assert symptom in found, (name, option, found)
            caught += 1
    print(f"{caught} wrong devices noticed by trainings on {DEVICE}")


if __name__ == "__main__":
    sys.exit(main())
