# SPDX-License-Identifier: Apache-2.0
"""The same clippers in training loops without declearn: `torch`, `tensorflow`, `jax`.

Each file imports its framework and is imported by nobody else in fedclip.
"""
