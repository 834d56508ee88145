# SPDX-License-Identifier: Apache-2.0
"""Which clipper when, measured: ``python -m benchmarks.study``; docs/study.md has what came out.

`scenes` are the federations and their troubles, `mechanisms` what is compared on them, `noised`
runs with central noise, `orderings` small copies of published comparisons, `cells` runs what is
not in the CSV files yet, and `tables` makes the page and the figure from these.
"""
