# SPDX-License-Identifier: Apache-2.0
"""What all tests share: quiet frameworks."""

from __future__ import annotations

import os

# TensorFlow and XLA write to stderr at import; must be set before anything imports them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
