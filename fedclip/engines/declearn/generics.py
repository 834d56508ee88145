# SPDX-License-Identifier: Apache-2.0
"""declearn's generic types, as those have them who know no framework."""

from __future__ import annotations

from typing import Any, TypeAlias

from declearn.model.api import Model, Vector
from declearn.optimizer.modules import OptiModule

AnyModel: TypeAlias = Model[Any]
AnyModule: TypeAlias = OptiModule[Any]
AnyVector: TypeAlias = Vector[Any]
