# SPDX-License-Identifier: Apache-2.0
"""What a clipper of your own is made of, in one place: bases, parameters, rules, transforms.

``docs/own-clipper.md`` shows how; `fedclip.testing` checks what comes out.
"""

from fedclip.arrays import Arithmetic as Arithmetic
from fedclip.arrays import Array as Array
from fedclip.modules.base import Clipper as Clipper
from fedclip.modules.families import ExactClipper as ExactClipper
from fedclip.modules.families import FixedClipper as FixedClipper
from fedclip.modules.families import LimitedClipper as LimitedClipper
from fedclip.modules.families import MeasuredClipper as MeasuredClipper
from fedclip.modules.families import SlicedClipper as SlicedClipper
from fedclip.modules.norm_clip import NormClip as NormClip
from fedclip.modules.own_limit import OwnLimit as OwnLimit
from fedclip.modules.sharing import HistoryClipper as HistoryClipper
from fedclip.modules.sharing import SharedClipper as SharedClipper
from fedclip.parameters import at_least_one as at_least_one
from fedclip.parameters import boolean as boolean
from fedclip.parameters import choice as choice
from fedclip.parameters import integer as integer
from fedclip.parameters import non_negative as non_negative
from fedclip.parameters import number as number
from fedclip.parameters import parameter as parameter
from fedclip.parameters import positive as positive
from fedclip.parameters import unit_interval as unit_interval
from fedclip.parameters import up_to as up_to
from fedclip.privacy import Context as Context
from fedclip.privacy import Map as Map
from fedclip.privacy import kinds as kinds
from fedclip.rules import NoState as NoState
from fedclip.rules import Rule as Rule
from fedclip.rules import State as State
from fedclip.rules.history import History as History
from fedclip.scopes import Groups as Groups
from fedclip.transforms import Action as Action
from fedclip.transforms import Gradient as Gradient
from fedclip.transforms import NormClipping as NormClipping
from fedclip.transforms import Outcome as Outcome
from fedclip.transforms import Transform as Transform
