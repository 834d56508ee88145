# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what a clip guarantees, noise, and what it costs.

It knows no engine: `fedclip.analyse` looks up declearn's plug-ins by name. Start reading at
`guarantees` (what one plug-in does to a norm) and `accounting` (epsilon of a run).
"""

from __future__ import annotations

from fedclip.errors import public_names
from fedclip.privacy.accounting import RELATIONS
from fedclip.privacy.guarantees import Context, Guarantee
from fedclip.privacy.sensitivity import GUARANTEES, Analysis, analyse_plugins

__all__ = ["GUARANTEES", "RELATIONS", "Analysis", "Context", "Guarantee", "analyse_plugins"]

__dir__ = public_names(__name__)
