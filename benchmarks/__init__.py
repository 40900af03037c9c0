"""What monoflow costs and whether it is right, measured against plain PyTorch. Each module is a command: `python -m benchmarks.step`."""
