"""What clipping costs: run with ``python -m benchmarks`` or ``make bench``.

Every cell is measured in a process of its own, and all that is compared is measured side by
side in that process, in turn, so that a busy machine slows all of it down alike. Numbers are
medians. Targets are printed beside the measured values, with a mark; nothing is asserted.
"""
