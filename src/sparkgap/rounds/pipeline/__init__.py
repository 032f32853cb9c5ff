"""The task pipeline: rounds chained on the device, which the host hears of while the next one runs."""
