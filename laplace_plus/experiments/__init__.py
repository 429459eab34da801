"""What the command line runs: training, wrapping, tuning, evaluating and reporting. Nothing below imports it."""
