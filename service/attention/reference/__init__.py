"""The float64 NumPy implementation that all others are compared with. Shares no arithmetic with the rest of `attention`."""
