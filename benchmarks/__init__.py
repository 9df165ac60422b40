"""Speed and memory of attention, beside other libraries and beside itself: `python -m benchmarks --help`."""
