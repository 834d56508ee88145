# SPDX-License-Identifier: Apache-2.0
"""Types of declearn's models, modules and vectors of any framework."""

from __future__ import annotations

from typing import Any, TypeAlias

from declearn.model.api import Model, Vector
from declearn.optimizer.modules import OptiModule

AnyModel: TypeAlias = Model[Any]
AnyModule: TypeAlias = OptiModule[Any]
AnyVector: TypeAlias = Vector[Any]
