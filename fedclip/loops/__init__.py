# SPDX-License-Identifier: Apache-2.0
"""The same clippers in training loops without declearn: torch, Lightning, Transformers, Keras, JAX.

Each file imports its framework; of the rest of fedclip, only commands import such files.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from fedclip.errors import LOOPS, part_of

if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        return part_of(__name__, name)


def __dir__() -> list[str]:
    return sorted(LOOPS)
