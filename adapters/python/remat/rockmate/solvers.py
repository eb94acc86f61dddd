# SPDX-License-Identifier: Apache-2.0
"""Rockmate's solvers, as settings for `top_solvers` and `bottom_solvers`."""

from ._configs import Settings


class HILP(Settings):
    name = "hilp"


class RK_rotor(Settings):
    name = "rotor"


class CheapSolver(Settings):
    name = "cheap"


class TwRemat(Settings):
    name = "twremat"


__all__ = ["CheapSolver", "HILP", "RK_rotor", "TwRemat"]
