# SPDX-License-Identifier: Apache-2.0
"""Transforms of a gradient: by norm, by value, by slice, by moment, by average."""

from fedclip.rules import State as State
from fedclip.transforms.action import Action as Action
from fedclip.transforms.base import DeviceState as DeviceState
from fedclip.transforms.base import Gradient as Gradient
from fedclip.transforms.base import NotFiniteError as NotFiniteError
from fedclip.transforms.base import Outcome as Outcome
from fedclip.transforms.base import Transform as Transform
from fedclip.transforms.base import clip_on_device as clip_on_device
from fedclip.transforms.base import device_state as device_state
from fedclip.transforms.base import prepare as prepare
from fedclip.transforms.base import take_step as take_step
from fedclip.transforms.norm import NormClipping as NormClipping
from fedclip.transforms.slice import SliceClipping as SliceClipping
