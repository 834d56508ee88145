# SPDX-License-Identifier: Apache-2.0
"""What a clipper does to a gradient: by norm, by value, by slice, by moment, by average.

Each class has a step for the host. Some also have a step for devices and compiled code.
"""

from fedclip.transforms.action import MARGIN, Action
from fedclip.transforms.base import Gradient, Outcome, Transform, clip_on_device
from fedclip.transforms.norm import NormClipping
from fedclip.transforms.slice import SliceClipping
from fedclip.transforms.value import ValueClipping

__all__ = [
    "MARGIN",
    "Action",
    "Gradient",
    "NormClipping",
    "Outcome",
    "SliceClipping",
    "Transform",
    "ValueClipping",
    "clip_on_device",
]
