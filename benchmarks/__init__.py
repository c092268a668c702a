"""What Tallybook can do, measured beside its baselines: `python -m benchmarks --help`."""
