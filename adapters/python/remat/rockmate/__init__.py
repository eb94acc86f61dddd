# SPDX-License-Identifier: Apache-2.0
"""Rockmate's API on top of remat. A program that trains with Rockmate changes its import:

    from remat.rockmate import PureRockmate, Hiremate    # was: from rockmate import PureRockmate, Hiremate

    rk_resnet = PureRockmate(resnet, sample, 2 * 1024**3)

A budget of Rockmate covers activations, their gradients and the workspaces of operators. It leaves out weights, gradients of weights,
optimizer states and inputs. These classes convert it: remat's `activation_budget` is this budget plus the bytes of the gradients of weights.
docs/coming-from.md lists all other differences.
"""

from . import partitioned, solvers
from ._configs import Config, default_config, generate_config, load_config, save_config
from ._kinds import Hiremate, Offmate, PureCheckmate, PureRockmate, PureRotor, from_config
from ._modules import Rockmate

PureHiremate = Hiremate  #: its name in Rockmate's README

__all__ = ["Config", "Hiremate", "Offmate", "PureCheckmate", "PureHiremate", "PureRockmate", "PureRotor", "Rockmate", "default_config", "from_config",
           "generate_config", "load_config", "partitioned", "save_config", "solvers"]
