# SPDX-License-Identifier: Apache-2.0
"""Everything for a clipper that you write: bases, parameters, rules, transforms.

``docs/own-clipper.md`` shows how; `fedclip.testing` checks what comes out.
"""

from fedclip.arrays import Arithmetic as Arithmetic
from fedclip.arrays import Array as Array
from fedclip.clippers.base import Clipper as Clipper
from fedclip.clippers.families import Exact as Exact
from fedclip.clippers.families import FixedLimit as FixedLimit
from fedclip.clippers.families import Measured as Measured
from fedclip.clippers.families import PastLimit as PastLimit
from fedclip.clippers.families import Sliced as Sliced
from fedclip.clippers.families import Warmup as Warmup
from fedclip.clippers.norm_clip import NormClip as NormClip
from fedclip.clippers.own_limit import OwnLimit as OwnLimit
from fedclip.clippers.sharing import Sharing as Sharing
from fedclip.core.parameters import at_least_one as at_least_one
from fedclip.core.parameters import boolean as boolean
from fedclip.core.parameters import choice as choice
from fedclip.core.parameters import integer as integer
from fedclip.core.parameters import non_negative as non_negative
from fedclip.core.parameters import number as number
from fedclip.core.parameters import parameter as parameter
from fedclip.core.parameters import positive as positive
from fedclip.core.parameters import unit_interval as unit_interval
from fedclip.core.parameters import up_to as up_to
from fedclip.core.scopes import Groups as Groups
from fedclip.privacy import Context as Context
from fedclip.privacy import Guarantee as Guarantee
from fedclip.privacy import guarantees as guarantees
from fedclip.rules import NoState as NoState
from fedclip.rules import Rule as Rule
from fedclip.rules import State as State
from fedclip.rules.history import History as History
from fedclip.transforms import Action as Action
from fedclip.transforms import Gradient as Gradient
from fedclip.transforms import NormClipping as NormClipping
from fedclip.transforms import Outcome as Outcome
from fedclip.transforms import Transform as Transform
