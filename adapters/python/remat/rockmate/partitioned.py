# SPDX-License-Identifier: Apache-2.0
"""The partitioners of rkGB (`rkgb.core.partitioned`), as settings for `partitioners`."""

from ._configs import Settings


class Partitioner(Settings):
    name = "base"


class PartitionerSequence(Settings):
    name = "sequence"


class PartitionerBottomToTop(Settings):
    name = "bottom_to_top"


class PartitionerRecognizeRepetitivePattern(Settings):
    name = "repetitive"


class PartitionerDagp(Settings):
    name = "dagp"


__all__ = ["Partitioner", "PartitionerBottomToTop", "PartitionerDagp", "PartitionerRecognizeRepetitivePattern", "PartitionerSequence"]
