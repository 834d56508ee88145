# SPDX-License-Identifier: Apache-2.0
"""The same clippers in training loops without declearn: torch, Lightning, Transformers, Keras, JAX.

Each file imports its framework; no other part of fedclip imports these files.
"""
